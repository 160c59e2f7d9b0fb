"""The Python interface: plans for modules, runs that own the parameters, what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_runs import ALL_IN_MEMORY, ALL_ON_DISK, make_machine, write_model
from torch import Tensor, nn
from torch.nn import functional

import packhorse
from packhorse.errors import DoesNotFitError, InputError, MismatchError, ModelError
from packhorse.optim.norm import clip_coefficient, global_norm
from packhorse.optim.optimizers import ParameterGroup
from packhorse.plan.files import format_plan, parse_plan
from packhorse.plan.spec import Plan
from packhorse.profile.analytic import estimate_profile
from packhorse.trainer.hand_over import move_to_meta

ROWS, LENGTH = 4, 12
CUT = {"microbatch_rows": 2}


class Tower(nn.Module):
    """Not a transformer: two layers with a skip, a dropout and a loss of its own kind."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = functional.gelu(self.first(x)) * self.scale
        error = (self.second(hidden) + x - target) ** 2
        if self.loss == "mean":
            return error.mean()
        kept = target[:, 0] > -1
        return (error.mean(dim=1) * kept).sum(), kept.sum()


class CountsByWeight(Tower):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = ((self.second(self.first(x)) - target) ** 2).sum()
        return loss, self.first.weight.abs().sum()


def token_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 5:] = -100
    labels[3] = -100
    return {"input_ids": ids, "labels": labels}


def tower_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, 8, generator=generator) for name in ("x", "target")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def load(folder: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).train()


@cache
def plan_text(config: str, pins: str, clips: bool) -> Plan:
    """Plan for a model by its config; plans depend on no weights and no paths."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig.from_json_file(config)
    ).train()
    chosen = ALL_ON_DISK if pins == "disk" else ALL_IN_MEMORY
    return packhorse.find_plan(
        model,
        token_batch(),
        make_machine(Path("unused")),
        optimizer=packhorse.AdamW(weight_decay=0.1),
        max_grad_norm=0.5 if clips else None,
        pins={**chosen, **CUT},
        measure=False,
    )


def plain_step(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """One step over two micro-batches, clipped at 0.5."""
    items = (batch["labels"][:, 1:] != -100).sum().float()
    optimizer.zero_grad()
    total: Tensor | None = None
    for first in range(0, ROWS, 2):
        part = {name: tensor[first : first + 2] for name, tensor in batch.items()}
        loss = model(**part, num_items_in_batch=items, use_cache=False).loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    norm = global_norm(parameter.grad for parameter in model.parameters())
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(clip_coefficient(norm, 0.5))
    optimizer.step()
    return float(total), float(norm)


def test_a_run_gives_the_bits_of_the_plain_loop_and_owns_the_parameters(
    folder: Path, tmp_path: Path
):
    plain, ours = load(folder), load(folder)
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    rest = [p for n, p in plain.named_parameters() if "norm" not in n]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1e-2,
        fused=True,
    )
    with packhorse.Run(
        ours,
        plan=plan_text(str(folder / "config.json"), "disk", True),
        optimizer=packhorse.AdamW(lr=1e-2, weight_decay=0.1),
        max_grad_norm=0.5,
        scratch=tmp_path / "scratch",
        audit=True,
    ) as run:
        for step in range(3):
            batch = token_batch(step)
            if step == 2:
                run.learning_rate = 3e-3
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3
            loss = run.step(batch)
            assert (loss, run.grad_norm) == plain_step(plain, batch, optimizer)
        assert all(parameter.is_meta for parameter in ours.parameters())
        assert run.timeline is not None
        state = run.state_dict()
        run.save(tmp_path / "saved")
    assert list(state) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name
    ours.load_state_dict(state, assign=True)
    assert ours.lm_head.weight is not None
    for name, parameter in load(tmp_path / "saved").named_parameters():
        assert torch.equal(parameter, state[name]), name


def test_frozen_parameters_lose_no_bit_to_bfloat16_unseen(folder: Path, tmp_path: Path):
    def build() -> nn.Module:
        module = load(folder)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        return module

    plan = packhorse.find_plan(
        build(),
        token_batch(),
        make_machine(tmp_path),
        pins={**ALL_IN_MEMORY, **CUT, "compute_dtype": "bfloat16"},
        measure=False,
    )
    exact = {n: p for n, p in load(folder).named_parameters() if "mlp" in n}

    def check_exact(saved: Path) -> None:
        found = dict(load(saved).named_parameters())
        for name, parameter in exact.items():
            assert torch.equal(parameter, found[name]), (saved, name)

    with packhorse.Run(build(), plan=plan, weights=folder) as run:
        run.step(token_batch())
        check_exact(run.save(tmp_path / "first"))
        checkpoint = run.save_checkpoint(tmp_path / "run")
        check_exact(checkpoint)
    with packhorse.Run(build(), plan=plan, weights=folder) as run:
        run.load(checkpoint, token_batch())
        check_exact(run.save(tmp_path / "second"))
    with packhorse.Run(build(), plan=plan) as run:
        run.step(token_batch())
        saved = load_file(run.save(tmp_path / "own") / "model.safetensors")
        assert {saved[name].dtype for name in exact} == {torch.bfloat16}


def test_weights_stream_into_a_module_on_meta_and_checkpoints_resume(folder: Path, tmp_path: Path):
    plan = plan_text(str(folder / "config.json"), "memory", True)
    options = {"plan": plan, "max_grad_norm": 0.5, "scratch": tmp_path / "scratch"}
    optimizer = packhorse.AdamW(lr=1e-2, weight_decay=0.1)

    def build() -> nn.Module:
        module = load(folder)
        move_to_meta(module)
        return module

    with packhorse.Run(build(), optimizer=optimizer, weights=folder, **options) as run:
        run.step(token_batch(0))
        run.step(token_batch(1))
        path = run.save_checkpoint(tmp_path / "run")
        expected = [run.step(token_batch(2)), run.step(token_batch(3))]
        states = run.state_dict()
    with packhorse.Run(build(), optimizer=optimizer, weights=folder, **options) as run:
        run.load(path, token_batch(0))
        assert run.num_steps == 2
        assert [run.step(token_batch(2)), run.step(token_batch(3))] == expected
        for name, tensor in run.state_dict().items():
            assert torch.equal(tensor, states[name]), name


@cache
def tower_plan(clips: bool = False) -> Plan:
    return packhorse.find_plan(
        Tower("mean"),
        tower_batch(),
        make_machine(Path("unused")),
        max_grad_norm=1.0 if clips else None,
        pins={**ALL_IN_MEMORY, **CUT},
        measure=False,
    )


def test_evaluation_changes_nothing():
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        first = run.evaluate(tower_batch())
        assert run.evaluate(tower_batch()) == first
        assert run.step(tower_batch()) == first
        assert run.evaluate(tower_batch()) != first


@pytest.mark.parametrize("kind", ["mean", "pair"])
def test_a_plain_module_trains_like_its_loop(tmp_path: Path, kind: str):
    plain, ours = Tower(kind), Tower(kind)
    ours.load_state_dict(plain.state_dict())
    machine = make_machine(tmp_path)
    sgd = packhorse.SGD(lr=0.1)
    plan = packhorse.find_plan(
        ours, tower_batch(), machine, optimizer=sgd, pins={**ALL_ON_DISK, **CUT}, measure=False
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    with packhorse.Run(
        ours, plan=plan, optimizer=sgd, scratch=tmp_path / "scratch", audit=True
    ) as run:
        for step in range(2):
            batch = tower_batch(step)
            count = 2.0 if kind == "mean" else float((batch["target"][:, 0] > -1).sum())
            optimizer.zero_grad()
            total = 0.0
            for first in range(0, ROWS, 2):
                found = plain(**{n: t[first : first + 2] for n, t in batch.items()})
                loss = (found if kind == "mean" else found[0]) / count
                loss.backward()
                total += loss.item()
            optimizer.step()
            assert run.step(batch) == pytest.approx(total, rel=1e-6)
        for name, tensor in run.state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


def test_a_count_that_needs_the_weights_is_refused(tmp_path: Path):
    module = CountsByWeight("pair")
    plan = packhorse.find_plan(
        module, tower_batch(), make_machine(tmp_path), pins=CUT, measure=False
    )
    with (
        packhorse.Run(module, plan=plan, scratch=tmp_path / "scratch") as run,
        pytest.raises(ModelError, match="depends on the parameters"),
    ):
        run.step(tower_batch())


def narrower(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "x": batch["x"][:, :6]}


def fewer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[:2] for name, tensor in batch.items()}


def doubled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "x": batch["x"].double()}


def renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"x": batch["x"], "goal": batch["target"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (narrower, "x has shape [4, 6], planned was [4, 8]"),
        (fewer, "x has shape [2, 8], planned was [4, 8]"),
        (doubled, "x is float64, planned was float32"),
        (renamed, "it has goal, x; planned were target, x"),
    ],
)
def test_a_batch_that_was_not_planned_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: str
):
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.step(tower_batch())
        with pytest.raises(InputError) as caught:
            run.step(change(tower_batch()))
        assert words in str(caught.value)
        run.step(tower_batch())


def test_what_contradicts_the_plan_is_refused():
    with (
        packhorse.Run(Tower("mean"), plan=tower_plan(clips=True)) as run,
        pytest.raises(InputError, match="the plan clips gradients"),
    ):
        run.step(tower_batch())
    with (
        packhorse.Run(Tower("mean"), plan=tower_plan(), optimizer=packhorse.SGD()) as run,
        pytest.raises(InputError, match="the plan is for adamw"),
    ):
        run.step(tower_batch())
    with (
        packhorse.Run(Tower("mean"), plan=tower_plan()) as run,
        pytest.raises(InputError, match="the batch has 8 rows, the plan is for 4"),
    ):
        run.step({name: torch.cat([t, t]) for name, t in tower_batch().items()})


def test_a_run_that_saw_no_batch_has_nothing_to_save(tmp_path: Path):
    with (
        packhorse.Run(Tower("mean"), plan=tower_plan()) as run,
        pytest.raises(InputError, match="no batch came yet"),
    ):
        run.save(tmp_path)


def test_a_batch_without_labels_is_refused(folder: Path):
    plan = plan_text(str(folder / "config.json"), "memory", True)
    batch = token_batch()
    with (
        packhorse.Run(
            load(folder), plan=plan, optimizer=packhorse.AdamW(weight_decay=0.1), max_grad_norm=0.5
        ) as run,
        pytest.raises(InputError, match="nothing to learn from"),
    ):
        run.step({**batch, "labels": torch.full_like(batch["labels"], -100)})


def test_batches_are_checked_before_anything_is_traced(folder: Path, tmp_path: Path):
    machine = make_machine(tmp_path)
    with pytest.raises(InputError, match="no labels"):
        packhorse.find_plan(load(folder), {"input_ids": torch.zeros(4, 8).long()}, machine)
    with pytest.raises(InputError, match="same number of rows"):
        packhorse.find_plan(Tower("mean"), {"x": torch.zeros(4, 8), "y": torch.ones(3)}, machine)


def test_what_does_not_fit_is_refused_with_the_smallest_budget(tmp_path: Path):
    machine = make_machine(tmp_path, device_bytes=4096)
    with pytest.raises(DoesNotFitError, match="device"):
        packhorse.find_plan(Tower("mean"), tower_batch(), machine, measure=False)


def test_progress_is_told(tmp_path: Path):
    heard: list[tuple[str, int, int]] = []
    packhorse.find_plan(
        Tower("mean"),
        tower_batch(),
        make_machine(tmp_path),
        measure=False,
        progress=lambda *told: heard.append(told),
    )
    assert [what for what, _, _ in heard] == [
        "exporting the model", "tracing 1 rows", "tracing 2 rows", "tracing 4 rows", "measuring",
    ]  # fmt: skip
    assert [index for _, index, _ in heard] == list(range(5))
    assert {num_parts for _, _, num_parts in heard} == {5}


def test_a_program_is_simulated(tmp_path: Path):
    machine = make_machine(tmp_path)
    module = Tower("mean")
    plan = packhorse.find_plan(module, tower_batch(), machine, pins=ALL_ON_DISK, measure=False)
    with packhorse.Run(module, plan=plan, scratch=tmp_path / "scratch") as run:
        run.step(tower_batch())
        timeline = packhorse.simulate(run.programs["train_step"], machine)
    assert timeline.makespan_ns >= timeline.step_ns > 0
    assert plan.prediction is not None
    assert timeline.step_ns == plan.prediction.step_ns


def test_the_names_are_there_without_torch():
    code = (
        "import packhorse, sys; packhorse.AdamW; packhorse.SGD; packhorse.find_plan;"
        "sys.exit(int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_simulation_needs_a_program_and_a_machine_and_draws_itself(tmp_path: Path):
    machine = make_machine(tmp_path)
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.step(tower_batch())
        program = run.programs["train_step"]
        timeline = packhorse.simulate(program, machine)
        assert str(program).startswith("packhorse/program ")
    assert 0 <= timeline.bubble < 1
    assert 0 <= timeline.idle_in_span < 1
    assert max(timeline.peak_bytes.values()) > 0
    assert timeline._repr_svg_().startswith("<svg")
    with pytest.raises(InputError, match=r"run\.programs"):
        packhorse.simulate(program.program, machine)


def test_a_profile_of_another_shape_is_refused(tmp_path: Path):
    machine = make_machine(tmp_path)
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.step(tower_batch())
        profile = replace(estimate_profile(run.model, machine), rows=3)
        with pytest.raises(MismatchError, match="3 x 8, those of the model 2 x 8"):
            packhorse.simulate(run.programs["train_step"], machine, profile=profile)


def test_state_dict_hands_the_parameters_back_until_the_next_step(tmp_path: Path):
    module = Tower("mean")
    with packhorse.Run(module, plan=tower_plan()) as run:
        run.step(tower_batch())
        state = run.state_dict()
        assert torch.equal(module.first.weight, state["first.weight"])
        run.step(tower_batch())
        assert all(parameter.is_meta for parameter in module.parameters())
        last = run.state_dict()
    assert not torch.equal(state["first.weight"], last["first.weight"])
    assert torch.equal(module.first.weight, last["first.weight"])
    assert torch.equal(run.state_dict()["second.bias"], last["second.bias"])


def test_save_hands_the_parameters_back_with_their_ties(folder: Path, tmp_path: Path):
    module = load(folder)
    plan = plan_text(str(folder / "config.json"), "memory", True)
    optimizer = packhorse.AdamW(weight_decay=0.1)
    with packhorse.Run(module, plan=plan, optimizer=optimizer, max_grad_norm=0.5) as run:
        run.step(token_batch())
        run.save(tmp_path / "saved")
        assert module.lm_head.weight is module.model.embed_tokens.weight
        state = run.state_dict()
        run.save(tmp_path / "saved")
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, state[name]), name


def test_a_closed_run_that_handed_nothing_back_says_so():
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.step(tower_batch())
    with pytest.raises(InputError, match="the run is closed"):
        run.state_dict()
    with pytest.raises(InputError, match="the run is closed"):
        run.save("unused")


def test_parameters_on_meta_have_no_state_before_the_first_batch(folder: Path):
    module = load(folder)
    move_to_meta(module)
    plan = plan_text(str(folder / "config.json"), "memory", True)
    optimizer = packhorse.AdamW(weight_decay=0.1)
    with (
        packhorse.Run(
            module, plan=plan, optimizer=optimizer, max_grad_norm=0.5, weights=folder
        ) as run,
        pytest.raises(InputError, match="no batch came yet"),
    ):
        run.state_dict()


def test_an_optimizer_with_other_groups_than_planned_is_refused():
    still = packhorse.AdamW(
        groups=(ParameterGroup(name="still", patterns=("first.*",), overrides={"lr": 0.0}),)
    )
    with pytest.raises(InputError, match=r"first\.weight is in group 'still'.*group 'decay'"):
        packhorse.Run(Tower("mean"), plan=tower_plan(), optimizer=still)
    for decay in (0.0, 0.1):
        # Other values in the planned groups are no other groups.
        packhorse.Run(
            Tower("mean"), plan=tower_plan(), optimizer=packhorse.AdamW(weight_decay=decay)
        ).close()


def test_the_scratch_folder_is_the_one_that_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    machine = make_machine(tmp_path / "fast")
    plan = packhorse.find_plan(
        Tower("mean"), tower_batch(), machine, pins={**ALL_ON_DISK, **CUT}, measure=False
    )
    disk = machine.tier("disk")
    assert disk is not None
    assert disk.path is not None
    assert parse_plan(format_plan(plan)).scratch == disk.path
    with packhorse.Run(Tower("mean"), plan=plan) as run:
        run.step(tower_batch())
        assert any(Path(disk.path).iterdir())
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("pin", "words"),
    [({"num_workers": 4}, "one process is one worker"), ({"attention": "eager"}, "as native")],
)
def test_pins_without_effect_are_refused(tmp_path: Path, pin: dict[str, object], words: str):
    with pytest.raises(InputError, match=words):
        packhorse.find_plan(
            Tower("mean"), tower_batch(), make_machine(tmp_path), pins=pin, measure=False
        )


def test_a_checkpoint_of_another_seed_or_optimizer_is_refused(tmp_path: Path):
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.learning_rate = 1
        run.step(tower_batch())
        path = run.save_checkpoint(tmp_path)
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        assert run.load(path, tower_batch()) == ()
        assert run.learning_rate == 1.0
    with (
        packhorse.Run(Tower("mean"), plan=tower_plan(), seed=7) as run,
        pytest.raises(MismatchError, match="the checkpoint's seed is 0, this run's is 7"),
    ):
        run.load(path, tower_batch())
    sgd = packhorse.SGD(lr=0.1)
    plan = packhorse.find_plan(
        Tower("mean"),
        tower_batch(),
        make_machine(tmp_path),
        optimizer=sgd,
        pins={"parameters": "device", "optimizer": "device", "microbatch_rows": 4},
        measure=False,
    )
    with (
        packhorse.Run(Tower("mean"), plan=plan, optimizer=sgd) as run,
        pytest.raises(MismatchError, match="optimizer adamw, this run's is sgd"),
    ):
        run.load(path, tower_batch())


def test_loading_says_which_numerics_changed(tmp_path: Path):
    with packhorse.Run(Tower("mean"), plan=tower_plan()) as run:
        run.step(tower_batch())
        path = run.save_checkpoint(tmp_path)
    plan = packhorse.find_plan(
        Tower("mean"),
        tower_batch(),
        make_machine(tmp_path),
        pins={"parameters": "device", "optimizer": "device", "microbatch_rows": 4},
        measure=False,
    )
    with packhorse.Run(Tower("mean"), plan=plan) as run:
        assert "microbatch_rows was 2, is 4" in run.load(path, tower_batch())
