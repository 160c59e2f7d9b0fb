"""Whatever a plan does: losses, norms, weights and optimizer states are those of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from subjects import choose_pairwise, find_subject
from torch import Tensor, nn
from torch.nn import functional

from bench.planned import PLACES, RESIDENT, Ways, trace_subject, train_by_plan
from bench.reference import Curve, find_differences, same_bits, train_plainly
from bench.zoo import ZOO, Weave, build_model, clip_of, make_optimizer_words, make_steps
from packhorse.optim.optimizers import SGD, AdamW, ParameterGroup

CASES = choose_pairwise(
    (
        tuple(ZOO),
        ("all", "frozen", "groups"),
        ("keep", "recompute"),
        tuple(PLACES),
        ("1", "4"),
        ("adamw", "momentum", "sgd"),
    )
)
ON_DISK = PLACES["all on disk"]


@cache
def plain_curve(name: str, training, microbatches: int, optimizer) -> Curve:
    entry = ZOO[name]
    return train_plainly(
        build_model(entry, training),
        make_optimizer_words(optimizer, entry, training),
        make_steps(entry, num_steps=5, num_microbatches=microbatches),
        max_grad_norm=clip_of(optimizer),
    )


def test_the_cases_contain_every_pair() -> None:
    assert {(name, training) for name, training, *_ in CASES} == {
        (name, training) for name in ZOO for training in ("all", "frozen", "groups")
    }
    assert {(place, count) for *_, place, count, _ in CASES} == {
        (place, count) for place in PLACES for count in ("1", "4")
    }


@pytest.mark.parametrize(
    ("name", "training", "activations", "place", "microbatches", "optimizer"), CASES
)
def test_five_steps_have_the_bits_of_the_plain_loop(
    name, training, activations, place, microbatches, optimizer, tmp_path: Path
) -> None:
    count = int(microbatches)
    subject = find_subject(name, training, optimizer)
    curve = train_by_plan(
        subject,
        replace(PLACES[place], activations=(activations,)),
        make_steps(ZOO[name], num_steps=5, num_microbatches=count),
        max_grad_norm=clip_of(optimizer),
        scratch=tmp_path,
    )
    assert find_differences(plain_curve(name, training, count, optimizer), curve) == ()


def test_a_difference_is_found() -> None:
    one = plain_curve("weave", "all", 1, "adamw")
    assert find_differences(one, one) == ()
    changed = {name: tensor.clone() for name, tensor in one.states["param"].items()}
    changed["norm.bias"][3] = torch.nextafter(changed["norm.bias"][3], torch.tensor(9.0))
    (difference,) = find_differences(one, replace(one, states={**one.states, "param": changed}))
    assert difference.startswith("param of norm.bias")
    assert find_differences(one, replace(one, norms=(*one.norms[:-1], 0.0)))
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))


def test_the_batches_are_hard() -> None:
    steps = make_steps(ZOO["llama"], num_steps=3, num_microbatches=4)
    counts = [[int((feed["labels"] != -100).sum()) for feed in step] for step in steps]
    assert all(row[1] == 0 for row in counts), "one micro-batch has no label"
    assert all(len(set(row)) == 4 for row in counts), "label tokens are unevenly spread"
    curve = plain_curve("llama", "all", 4, "adamw")
    assert all(losses[1] == 0.0 for losses in curve.losses)


@pytest.mark.parametrize("name", ZOO)
def test_each_gradient_has_the_bits_of_autograd(name: str, tmp_path: Path) -> None:
    """After one step with momentum the buffer is the gradient; lr 1 subtracts it."""
    entry = ZOO[name]
    steps = make_steps(entry, num_steps=1, num_microbatches=2)
    module = build_model(entry)
    subject = replace(
        find_subject(name, "all", "momentum"), optimizer=SGD(lr=1.0, momentum=0.5, weight_decay=0.0)
    )
    for feed in steps[0]:
        batch = {key: value for key, value in feed.items() if key != "denominator"}
        if entry.loss == "sum":
            extra = {"num_items_in_batch": feed["denominator"], "use_cache": False}
            loss = module(**batch, **extra).loss
        else:
            loss = module(**batch) / 2
        loss.backward()
    curve = train_by_plan(
        subject, Ways(activations=("recompute",)), steps, max_grad_norm=None, scratch=tmp_path
    )
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert same_bits(curve.states["momentum_buffer"][parameter_name], parameter.grad)
        with torch.no_grad():
            parameter.sub_(parameter.grad)
        assert same_bits(curve.states["param"][parameter_name], parameter.detach())


@pytest.mark.parametrize("heap", ["keep", "map"])
def test_mixed_plans_have_the_same_bits(heap, tmp_path: Path) -> None:
    """Every chunk and block otherwise than its neighbour, and chunks of another size."""
    ways = Ways(
        parameters=("disk", "device", "device"),
        gradients=("device", "disk"),
        optimizer=("disk", "disk", "device"),
        activations=("recompute", "keep", "recompute"),
        heap=heap,
        chunk_bytes=4096,
    )
    steps = make_steps(ZOO["weave"], num_steps=5, num_microbatches=4)
    curve = train_by_plan(find_subject("weave"), ways, steps, max_grad_norm=0.5, scratch=tmp_path)
    assert find_differences(plain_curve("weave", "all", 4, "adamw"), curve) == ()


def test_a_parameter_in_several_chunks_has_the_same_bits(tmp_path: Path) -> None:
    """An embedding of 1.3 M scalars, tied to the head, is cut: in chunks, on disk, in the norm."""

    def build() -> Weave:
        torch.manual_seed(0)
        return Weave(vocabulary=40_000)

    steps = make_steps(ZOO["weave"], num_steps=3, num_microbatches=2, rows=1, length=6)
    optimizer = AdamW(lr=1e-2)
    batch = {"input_ids": steps[0][0]["input_ids"], "labels": steps[0][0]["labels"]}
    subject = trace_subject(build(), batch, optimizer)
    plain = train_plainly(build(), optimizer, steps, max_grad_norm=0.1)
    for ways in (RESIDENT, ON_DISK):
        ways = replace(ways, chunk_bytes=1 << 21, activations=("recompute", "keep"))
        curve = train_by_plan(subject, ways, steps, max_grad_norm=0.1, scratch=tmp_path)
        assert find_differences(plain, curve) == ()


@pytest.mark.parametrize("rows", [1, 3])
def test_other_rows_than_the_examples(rows: int, tmp_path: Path) -> None:
    """One export at two rows serves micro-batches of one and three."""
    from packhorse.graph.trace import trace_blocks

    entry = ZOO["gemma3"]
    subject = find_subject("gemma3")
    assert subject.exported.batch_is_dynamic
    groups = {name: p.group for name, p in subject.traced.model.parameters.items()}
    subject = replace(subject, traced=trace_blocks(subject.exported, rows=rows, groups=groups))
    steps = make_steps(entry, num_steps=2, num_microbatches=2, rows=rows)
    plain = train_plainly(build_model(entry), subject.optimizer, steps, max_grad_norm=1.0)
    curve = train_by_plan(subject, ON_DISK, steps, max_grad_norm=1.0, scratch=tmp_path)
    assert find_differences(plain, curve) == ()


def test_groups_with_a_learning_rate_of_their_own_follow_a_schedule(tmp_path: Path) -> None:
    """The rate of a group at the base rate is its own rate in every bit."""
    entry = ZOO["weave"]
    base, own = 7.5e-4, 15_000_000.5 * 2**-33
    careless = torch.tensor([base * (own / base), own], dtype=torch.float32)
    assert careless[0] != careless[1], "the rates must tell a careless product apart"
    optimizer = SGD(
        lr=base,
        groups=(ParameterGroup(name="slow", patterns=("blocks.*",), overrides={"lr": own}),),
    )
    steps = make_steps(entry, num_steps=2, num_microbatches=1)
    batch = {"input_ids": steps[0][0]["input_ids"], "labels": steps[0][0]["labels"]}
    subject = trace_subject(
        build_model(entry), batch, optimizer, exported=find_subject("weave").exported
    )
    plain = train_plainly(build_model(entry), optimizer, steps, max_grad_norm=None)
    curve = train_by_plan(subject, RESIDENT, steps, max_grad_norm=None, scratch=tmp_path)
    assert find_differences(plain, curve) == ()


class Counted(nn.Module):
    """Returns (sum, count), as a plain module with uneven labels does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.embed(input_ids)
        for layer in self.layers:
            x_BTD = x_BTD + torch.relu(layer(x_BTD))
        logits_BTV = self.head(x_BTD)
        total = functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return total, (labels != -100).sum()


def test_a_module_that_returns_a_sum_and_a_count(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Counted()

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (3, 2, 7), generator=generator)
    labels = tokens.clone()
    labels[0, 0, :5] = -100
    labels[1] = -100
    denominator = (labels != -100).sum().float()
    step = tuple(
        {"input_ids": tokens[m], "labels": labels[m], "denominator": denominator} for m in range(3)
    )
    optimizer = AdamW(lr=1e-2)
    batch = {"input_ids": tokens[0], "labels": labels[0]}
    subject = trace_subject(build(), batch, optimizer)
    curve = train_by_plan(subject, ON_DISK, [step] * 3, max_grad_norm=1.0, scratch=tmp_path)
    plain = train_plainly(build(), optimizer, [step] * 3, max_grad_norm=1.0)
    assert find_differences(plain, curve) == ()
    assert plain.losses[0][1] == 0.0
