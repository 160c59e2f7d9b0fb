"""Saves a run or a model: tensors come in pieces, the folder appears when all is on the disk.

    checkpoint-N.tmp-XXXXXXXX/   model, optimizer, config and tokenizer files, then packhorse.json
    every file to the disk, folder renamed to checkpoint-N, its parent to the disk
    older checkpoints deleted (renamed away first)

In: what the tensors are, pieces of states in any order, and a callable that adds the small files
of the model. Out: a folder that `from_pretrained` loads and any plan can resume from. Interrupted
at any moment, earlier checkpoints are untouched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from torch import Tensor

from packhorse.checkpoint.checksums import checksum_file
from packhorse.checkpoint.folders import (
    checkpoint_path,
    limit_checkpoints,
    make_room,
    remove_folder,
    temporary_path,
)
from packhorse.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    RunState,
    format_manifest,
)
from packhorse.checkpoint.tensor_files import INDEX_NAME
from packhorse.checkpoint.tensor_plan import (
    DEFAULT_SHARD_BYTES,
    TensorPlan,
    plan_shards,
    render_index,
)
from packhorse.checkpoint.tensor_writer import TensorFileWriter
from packhorse.errors import StorageError
from packhorse.storage.durable import commit_folder, fsync_folder, fsync_tree
from packhorse.storage.space import ensure_space, explain_failure
from packhorse.units import MIB

AddFiles = Callable[[Path], None]

# Config, tokenizer and manifest: a generous share of what is checked before a save begins.
SMALL_FILES_BYTES: Final = 32 * MIB
# Named one by one: a run folder or another tool's holds JSON that is no part of its model.
_MODEL_FILE_PATTERNS: Final = (
    "config.json", "*_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "vocab*.json", "normalizer.json", "chat_template*.json",
    "*.jinja", "additional_chat_templates/*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken",
    "*.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of elements of one state of one parameter.

    `start` counts elements from the parameter's own start; `values` is contiguous, of any dtype
    and device, and is not kept.
    """

    parameter: str
    state: str
    start: int
    values: Tensor


class CheckpointWriter:
    """A checkpoint in the making; pieces are pushed in, `commit` gives it its name.

    Leaving the `with` block without `commit` removes everything that was written.

    Args:
        output_dir: the run folder; made when missing.
        model_only: leave optimizer states and resumability out.
        add_files: writes config, generation config and tokenizer into the folder it is given.

    Raises:
        StorageError: the disk is too small, full or unwritable.
    """

    def __init__(
        self,
        output_dir: Path,
        run: RunState,
        plan: TensorPlan,
        *,
        add_files: AddFiles,
        model_only: bool = False,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._run = run
        self._model_only = model_only
        self._final = checkpoint_path(output_dir, run.step)
        self._add_files = add_files
        kept = TensorPlan(model=plan.model, optimizer=()) if model_only else plan
        self._folder = _FolderWriter(self._final, kept, max_shard_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.discard()

    @property
    def states(self) -> frozenset[tuple[str, str]]:
        """The (parameter, state) pairs that must arrive completely; others are an error."""
        return self._folder.states

    def write(self, piece: Piece) -> None:
        """Take a piece; blocks until its bytes are handed to the system.

        Raises:
            StorageError: the disk is full or fails.
            ValueError: no such state, or the piece lies outside of it or came before.
        """
        self._folder.write(piece)

    def commit(self, *, save_total_limit: int | None = None) -> Path:
        """Make the checkpoint durable, give it its name, then delete surplus older ones.

        Blocks until all is on the disk. A checkpoint of the same step is replaced.

        Raises:
            StorageError: the disk is full or fails; earlier checkpoints are untouched.
            ValueError: part of a state never came.
        """
        files = self._folder.finish(self._add_files)
        manifest = Manifest(run=self._run, model_only=self._model_only, files=files)
        try:
            (self._folder.path / MANIFEST_NAME).write_text(format_manifest(manifest), "utf-8")
            fsync_tree(self._folder.path)
            replaced = make_room(self._final)
        except OSError as error:
            raise explain_failure(error, self._final, f"write {MANIFEST_NAME}") from error
        try:
            commit_folder(self._folder.path, self._final)
        except StorageError:
            if replaced is not None and not self._final.exists():
                replaced.rename(self._final)
            raise
        if replaced is not None:
            remove_folder(replaced)
        if save_total_limit is not None:
            limit_checkpoints(self._final.parent, limit=save_total_limit, newest=self._final)
        return self._final


class ModelWriter:
    """A model in the making, to lie at the top of a folder among other files.

    Leaving the `with` block without `commit` removes everything that was written.

    Raises:
        StorageError: the disk is too small, full or unwritable.
    """

    def __init__(
        self,
        output_dir: Path,
        plan: TensorPlan,
        *,
        add_files: AddFiles,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._output_dir = output_dir
        self._add_files = add_files
        kept = TensorPlan(model=plan.model, optimizer=())
        self._folder = _FolderWriter(output_dir / "model", kept, max_shard_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.discard()

    @property
    def states(self) -> frozenset[tuple[str, str]]:
        """The (parameter, state) pairs that must arrive completely; others are an error."""
        return self._folder.states

    def write(self, piece: Piece) -> None:
        """Take a piece; see `CheckpointWriter.write`."""
        self._folder.write(piece)

    def commit(self) -> Path:
        """Make all files durable and move them to the top of the folder, one after the other.

        Weights of an earlier model there, which the new files do not replace, are removed.

        Raises:
            StorageError: the disk is full or fails.
            ValueError: part of a tensor never came.
        """
        names = [entry.name for entry in self._folder.finish(self._add_files)]
        try:
            fsync_tree(self._folder.path)
            for name in names:
                target = self._output_dir / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (self._folder.path / name).replace(target)
            for stale in self._output_dir.glob("model*.safetensors*"):
                if stale.name not in names and stale.is_file():
                    stale.unlink()
            for folder in {(self._output_dir / name).parent for name in names}:
                fsync_folder(folder)
        except OSError as error:
            raise explain_failure(error, self._output_dir, "save the model") from error
        return self._output_dir


def save_checkpoint(
    output_dir: Path,
    run: RunState,
    plan: TensorPlan,
    pieces: Iterable[Piece],
    *,
    add_files: AddFiles,
    model_only: bool = False,
    save_total_limit: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Save a checkpoint from pieces that can be pulled; see `CheckpointWriter`.

    Raises:
        StorageError: the disk is too small, full or unwritable.
        ValueError: the pieces are not those of the plan.
    """
    with CheckpointWriter(
        output_dir,
        run,
        plan,
        add_files=add_files,
        model_only=model_only,
        max_shard_bytes=max_shard_bytes,
    ) as writer:
        for piece in pieces:
            writer.write(piece)
        return writer.commit(save_total_limit=save_total_limit)


def copy_model_files(source: Path) -> AddFiles:
    """Give a callable that copies a Hugging Face folder's config, tokenizer and code, no more."""

    def copy(target: Path) -> None:
        for pattern in _MODEL_FILE_PATTERNS:
            for file in sorted(source.glob(pattern)):
                copied = target / file.relative_to(source)
                if file.is_file() and not copied.exists():
                    copied.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copied)

    return copy


class _FolderWriter:
    """Tensor files in a temporary folder beside `final`, and which piece goes where."""

    def __init__(self, final: Path, plan: TensorPlan, max_shard_bytes: int) -> None:
        self.path = temporary_path(final)
        self._plan = plan
        self._writers: list[TensorFileWriter] = []
        self._routes: dict[tuple[str, str], list[tuple[TensorFileWriter, str]]] = {}
        self._shards = plan_shards(plan, max_shard_bytes)
        self._exit = ExitStack()
        need_bytes = plan.file_bytes(max_shard_bytes) + SMALL_FILES_BYTES
        with ExitStack() as on_failure:
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
                ensure_space(final.parent, need_bytes, f"saving {final.name}")
                self.path.mkdir()
                on_failure.callback(self.discard)
            except OSError as error:
                raise explain_failure(error, final.parent, f"make {self.path.name}") from error
            for name, tensors in self._shards.items():
                specs = [tensor.spec for tensor in tensors]
                writer = self._exit.enter_context(TensorFileWriter(self.path / name, specs))
                self._writers.append(writer)
                for tensor in tensors:
                    route = self._routes.setdefault((tensor.parameter, tensor.state), [])
                    route.append((writer, tensor.spec.name))
            on_failure.pop_all()

    @property
    def states(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._routes)

    def write(self, piece: Piece) -> None:
        route = self._routes.get((piece.parameter, piece.state))
        if route is None:
            raise ValueError(f"{piece.state} of {piece.parameter!r} is not part of what is saved")
        for writer, name in route:
            writer.write(name, piece.start, piece.values)

    def finish(self, add_files: AddFiles) -> tuple[FileEntry, ...]:
        """Complete all tensor files, add the others, and list everything."""
        entries = {writer.name: writer.finish() for writer in self._writers}
        try:
            add_files(self.path)
            index = render_index(self._shards)
            if index is not None:
                (self.path / INDEX_NAME).write_text(index, "utf-8")
            for file in sorted(self.path.rglob("*")):
                name = file.relative_to(self.path).as_posix()
                if file.is_file() and name not in entries:
                    entries[name] = FileEntry(
                        name=name, size_bytes=file.stat().st_size, crc32=checksum_file(file)
                    )
        except OSError as error:
            raise explain_failure(error, self.path, "write the model's small files") from error
        return tuple(entries[name] for name in sorted(entries))

    def discard(self) -> None:
        """Close all files and remove the temporary folder if it still is there."""
        self._exit.close()
        shutil.rmtree(self.path, ignore_errors=True)
