from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    FROZEN,
    SHAPES,
    add_config,
    cut_pieces,
    make_layout,
    make_model,
    make_plan,
    make_run,
    make_values,
)
from safetensors.torch import load_file

from packhorse.checkpoint.folders import (
    clean_leftovers,
    find_checkpoints,
    newest_complete,
    verify_checkpoint,
)
from packhorse.checkpoint.resume import SavedRun
from packhorse.checkpoint.save import (
    CheckpointWriter,
    ModelWriter,
    Piece,
    copy_model_files,
    save_checkpoint,
)
from packhorse.errors import FileFormatError, MismatchError, StorageError


def save(output_dir: Path, step: int, **options) -> Path:
    layout = make_layout(256)
    return save_checkpoint(
        output_dir,
        make_run(step),
        make_plan(layout),
        cut_pieces(make_values(step), layout),
        add_files=add_config,
        **options,
    )


def check_states(path: Path, values: dict[tuple[str, str], torch.Tensor], layout) -> None:
    """Read every state back piece by piece, under the cut of `layout`."""
    with SavedRun(path) as saved:
        for piece in cut_pieces(values, layout):
            target = torch.full_like(piece.values, float("nan"))
            stop = piece.start + piece.values.numel()
            saved.read_into(piece.parameter, piece.state, piece.start, stop, target)
            assert torch.equal(target, piece.values), (piece.parameter, piece.state)


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("cut", "other_cut"), [(64, 2048), (2048, 96), (160, 160)])
def test_resumes_under_another_cut(
    tmp_path: Path, dtype: str, param: str, cut: int, other_cut: int
) -> None:
    layout = make_layout(cut, param=param)
    values = make_values(7, param=param)
    plan = make_plan(layout, dtype)
    pieces = cut_pieces(values, layout, backwards=True)
    path = save_checkpoint(
        tmp_path, make_run(7), plan, pieces_of(plan, pieces), add_files=add_config
    )
    assert path == tmp_path / "checkpoint-7"
    check_states(path, values, make_layout(other_cut, param=param))
    with SavedRun(path) as saved:
        assert saved.run == make_run(7)
        saved.check_model(make_model(dtype), make_layout(other_cut, param=param))
    weights = load_file(path / "model.safetensors")
    assert set(weights) == set(SHAPES)
    for name, weight in weights.items():
        assert weight.dtype == getattr(torch, dtype)
        exact = values.get((name, "master"), values[name, "param"])
        assert torch.equal(weight, exact.to(weight.dtype))


def pieces_of(plan, pieces):
    return (piece for piece in pieces if (piece.parameter, piece.state) in plan.states)


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer-00001-of-00001.safetensors",
        "packhorse.json",
    ]
    manifest = json.loads((path / "packhorse.json").read_text())
    assert (manifest["kind"], manifest["version"]) == ("packhorse/checkpoint", 1)
    assert [entry["name"] for entry in manifest["files"]] == [
        "config.json",
        "model.safetensors",
        "optimizer-00001-of-00001.safetensors",
    ]
    states = load_file(path / "optimizer-00001-of-00001.safetensors")
    trained = [name for name in SHAPES if name != FROZEN]
    assert set(states) == {f"{name}/{s}" for name in trained for s in ("exp_avg", "exp_avg_sq")}


def test_shards(tmp_path: Path) -> None:
    path = save(tmp_path, 1, max_shard_bytes=2500)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert "model-00001-of-00002.safetensors" in names
    assert len([name for name in names if name.startswith("optimizer-")]) > 2
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(SHAPES)
    assert (
        index["metadata"]["total_size"] == sum(torch.Size(s).numel() for s in SHAPES.values()) * 4
    )
    check_states(path, make_values(1), make_layout(320))


def test_pieces_that_do_not_belong(tmp_path: Path) -> None:
    layout = make_layout(256)
    with CheckpointWriter(tmp_path, make_run(1), make_plan(layout), add_files=add_config) as writer:
        assert (FROZEN, "exp_avg") not in writer.states
        with pytest.raises(ValueError, match="exp_avg of 'norm' is not part of what is saved"):
            writer.write(Piece(parameter=FROZEN, state="exp_avg", start=0, values=torch.zeros(16)))
        with pytest.raises(ValueError, match="were never written"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_save_total_limit_deletes_only_older_ones_of_ours(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    for step in (2, 3, 4, 9):
        save(tmp_path, step)
    save(tmp_path, 5, save_total_limit=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        "checkpoint-1",
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-9",
    ]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_damaged_checkpoints_do_not_count_for_the_limit(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    save(tmp_path, 3, save_total_limit=2)
    names = [path.name for path in find_checkpoints(tmp_path)]
    assert names == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4)
    layout = make_layout(512)
    values = make_values(99)
    save_checkpoint(
        tmp_path, make_run(4), make_plan(layout), cut_pieces(values, layout), add_files=add_config
    )
    check_states(tmp_path / "checkpoint-4", values, layout)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_model_only_cannot_resume(tmp_path: Path) -> None:
    layout = make_layout(256)
    plan = make_plan(layout)
    with CheckpointWriter(
        tmp_path, make_run(2), plan, add_files=add_config, model_only=True
    ) as writer:
        assert writer.states == {(name, "param") for name in SHAPES}
        for piece in cut_pieces(make_values(2), layout):
            if (piece.parameter, piece.state) in writer.states:
                writer.write(piece)
        path = writer.commit()
    assert not list(path.glob("optimizer*"))
    verify_checkpoint(path, resumable=False)
    with pytest.raises(FileFormatError, match="holds only the model"):
        SavedRun(path)
    newest = newest_complete(tmp_path)
    assert newest.path is None
    assert "save_only_model" in newest.skipped[0].reason


def test_another_model_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    layout = make_layout(256)
    with SavedRun(save(tmp_path, 2)) as saved:
        with pytest.raises(MismatchError, match="with fingerprint f00d, this model has beef"):
            saved.check_model(make_model(fingerprint="beef"), layout)
        model = make_model()
        smaller = {n: p for n, p in model.parameters.items() if n != "block.bias"}
        with pytest.raises(MismatchError, match=r"this model has no parameter 'block.bias'"):
            saved.check_model(type(model)(**{**fields_of(model), "parameters": smaller}), layout)
        extra = make_layout(256, param="bfloat16")
        saved.check_model(model, extra)
        dtypes = {**layout.dtypes, "momentum_buffer": "float32"}
        other = type(layout)(chunks=layout.chunks, slots=layout.slots, dtypes=dtypes)
        with pytest.raises(FileFormatError, match="the optimizer kept other states"):
            saved.check_model(model, other)
        with pytest.raises(FileFormatError, match=r"no exp_avg of 'norm'.* it was frozen"):
            saved.read_into(FROZEN, "exp_avg", 0, 16, torch.zeros(16))


def fields_of(value) -> dict:
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


def test_damage_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 100):
        save(tmp_path, step)
    newest = tmp_path / "checkpoint-100"
    for name in ("model.safetensors", "optimizer-00001-of-00001.safetensors", "config.json"):
        whole = (newest / name).read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            (newest / name).write_bytes(flipped)
            with pytest.raises(FileFormatError, match=f"{name} is damaged"):
                SavedRun(newest)
        (newest / name).write_bytes(whole[:-1])
        with pytest.raises(FileFormatError, match=f"{name} is damaged: it has"):
            verify_checkpoint(newest, checksums=False)
        (newest / name).unlink()
        found = newest_complete(tmp_path)
        assert found.path == tmp_path / "checkpoint-20"
        assert [skipped.path for skipped in found.skipped] == [newest]
        assert f"{name} is missing" in found.skipped[0].reason
        (newest / name).write_bytes(whole)
    assert newest_complete(tmp_path).path == newest


def test_no_flipped_bit_of_the_manifest_is_believed(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "packhorse.json"
    whole = path.read_bytes()
    content = json.loads(whole)
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        try:
            verify_checkpoint(path.parent)
        except FileFormatError:
            continue
        # A flip in white space changes nothing that is read.
        assert json.loads(flipped) == content
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(FileFormatError, match="has version 2, this Packhorse reads up to 1"):
        verify_checkpoint(path.parent)


def test_folders_of_other_tools_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    found = newest_complete(tmp_path)
    assert found.path is None
    assert found.skipped[0].reason.startswith("checkpoint-5 has no packhorse.json")
    assert newest_complete(tmp_path / "absent").path is None


def test_only_own_leftovers_are_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mine = ["checkpoint-3.tmp-0123abcd", "model.tmp-00000000", "checkpoint-1.old-00000001"]
    theirs = ["checkpoint-3.tmp-notes", "data.tmp-0123abcd", "checkpoint-3.bak", "old"]
    for name in (*mine, *theirs):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-2.old-00000002").mkdir()
    (tmp_path / "checkpoint-4.tmp-01234567").write_text("a file")
    clean_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *theirs,
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-4.tmp-01234567",
    }


def test_what_cannot_be_removed_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def refuse(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match=r"cannot remove checkpoint-1\.old-"):
        save(tmp_path, 1)
    with pytest.raises(StorageError, match=r"cannot remove checkpoint-1\.tmp-"):
        save(tmp_path, 2, save_total_limit=1)
    with pytest.raises(StorageError, match="cannot remove"):
        clean_leftovers(tmp_path)
    verify_checkpoint(tmp_path / "checkpoint-2")


MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/tools.jinja",
)  # fmt: skip


def test_model_at_the_top_of_a_folder(tmp_path: Path) -> None:
    layout = make_layout(256)
    source = tmp_path / "source"
    source.mkdir()
    (source / "additional_chat_templates").mkdir()
    others = ("README.md", "plan.json", "machine.json", "model.json", "timeline-measured.json")
    for name in (*MODEL_FILES, *others, "profile.json", "trainer_state.json"):
        (source / name).write_text(name)
    (source / "model.safetensors.index.json").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}")
    (run / "plan.json").write_text("of this run")
    for max_shard_bytes in (2500, 5_000_000):
        with ModelWriter(
            run,
            make_plan(layout),
            add_files=copy_model_files(source),
            max_shard_bytes=max_shard_bytes,
        ) as writer:
            for piece in cut_pieces(make_values(8), layout):
                if (piece.parameter, piece.state) in writer.states:
                    writer.write(piece)
            assert writer.commit() == run
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert found == {*MODEL_FILES, "metrics.jsonl", "model.safetensors", "plan.json"}
    assert (run / "plan.json").read_text() == "of this run"
    for name, weight in load_file(run / "model.safetensors").items():
        assert torch.equal(weight, make_values(8)[name, "param"])
