"""Crashes: SIGKILL at random moments of training and saving, then `--resume`, bit for bit.

A tiny Llama is trained by `packhorse train` in processes of their own. A run that nothing
interrupts gives the curve and the weights. Then run after run is killed from outside, its whole
process group at once, at seeded random moments: half of them spread over the steps, each somewhere
between a step and the next, half when a checkpoint or the model has a random share of its bytes on
the disk. Each is resumed, some are killed again first, and must end with the same lines in
`metrics.jsonl`, the same weights and the same optimizer state. Runs alternate between a plan with
everything in memory and one with everything on disk. Further runs are resumed under the other
plan, and stopped by SIGTERM.

All of these keep no steps, so that they show what checkpoints hold. A second round saves nothing
until the end and keeps steps in the scratch folder: each one where everything lies on the disk,
every few where it lies in memory. It is killed in the same way, and loses at most one step, or the
interval; SIGTERM ends it without a save. What keeping costs is the time of a step with and without.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.crash_site import (
    KEEP_STEPS,
    NUM_STEPS,
    PINS,
    SAVE_STEPS,
    STOPPED,
    ByBytes,
    ByProgress,
    Moment,
    Place,
    Reference,
    Site,
    explain,
    has_begun,
    is_same,
    is_saving,
    keep,
    kept_step,
    kill_at,
    last_step,
    read_ending,
    saved_steps,
    stored_bytes,
    wait_for,
)
from bench.report import Bench, at_most, exactly, run_bench, shown
from packhorse.units import format_ns

NUM_KILLS: Final = 20
NUM_QUICK_KILLS: Final = 4
NUM_KEPT_KILLS: Final = 50
STOP_LIMIT_S: Final = 20.0
NUM_TIMED: Final = 3
NUM_QUICK_TIMED: Final = 1
SEED: Final = 20
OTHER: Final[Mapping[Place, Place]] = {"memory": "disk", "disk": "memory"}


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the trials came to."""

    resumed: int = 0
    same: int = 0
    trials: int = 0
    most_lost: int = 0
    during_saves: int = 0
    kills: list[str] = field(default_factory=list)


def measure(bench: Bench) -> None:
    """Kill and resume; one table."""
    num_kills = bench.options.kills or (NUM_QUICK_KILLS if bench.quick else NUM_KILLS)
    num_kept_kills = bench.options.kept_kills or (
        NUM_QUICK_KILLS if bench.quick else NUM_KEPT_KILLS
    )
    draw = random.Random(bench.options.seed)
    with tempfile.TemporaryDirectory(prefix="packhorse-crash-") as scratch:
        site = Site(Path(scratch))
        references: dict[Place, Reference] = {
            place: _run_through(bench, site, place) for place in PINS
        }
        same_plans = references["memory"].ending == references["disk"].ending
        tally = Tally()
        for index, moments in enumerate(draw_moments(draw, num_kills)):
            place: Place = "memory" if index % 2 else "disk"
            _kill_and_resume(bench, site, references[place], place, index, moments, tally)
        killed = len(tally.kills)
        bench.add(
            "Killed and resumed",
            [
                exactly("kills that struck", killed, num_kills),
                shown("of them while a checkpoint or the model was written", tally.during_saves),
                exactly("resumed and finished", tally.resumed, tally.trials),
                exactly("curve, weights, state with the same bits", tally.same, tally.trials),
                at_most("most steps lost by a kill", tally.most_lost, SAVE_STEPS),
                exactly("the two plans with the same bits", int(same_plans), 1),
            ],
        )
        others = [_change_plan(bench, site, references, place, draw) for place in PINS]
        stops = [_stop_and_resume(bench, site, references, place, draw) for place in PINS]
        _measure_kept(bench, site, references, draw, num_kept_kills)
        left = [path.name for path in (site.folder / "scratch").glob("*")]
        bench.add(
            "Other ends",
            [
                exactly("killed, resumed under the other plan: same bits", sum(others), 2),
                exactly("SIGTERM: exit 75, resumed, same bits", sum(stops), 2),
                exactly("scratch files left", len(left), 0),
            ],
        )


def draw_moments(draw: random.Random, count: int) -> list[tuple[Moment, ...]]:
    """Draw the moments of each run: half in the steps, half in saves, some runs with one of each.

    A run that is killed twice is first killed in the first half of its steps.
    """
    num_bytes = count // 2
    early = list(range(SAVE_STEPS, NUM_STEPS // 2 + 1, SAVE_STEPS))
    saves: list[int | None] = [*range(SAVE_STEPS, NUM_STEPS + 1, SAVE_STEPS), None]
    num_steps = count - num_bytes
    steps = [ByProgress(share=(at + draw.random()) / num_steps) for at in range(num_steps)]
    draw.shuffle(steps)
    num_pairs = num_bytes // 2
    pairs: list[tuple[Moment, ...]] = [
        (ByBytes(step=draw.choice(early), share=draw.random()), step) for step in steps[:num_pairs]
    ]
    singles: list[tuple[Moment, ...]] = [(step,) for step in steps[num_pairs:]]
    singles += [
        (ByBytes(step=draw.choice(saves) if at else None, share=draw.random()),)
        for at in range(num_bytes - num_pairs)
    ]
    trials = pairs + singles
    draw.shuffle(trials)
    return trials


def _run_through(bench: Bench, site: Site, place: Place) -> Reference:
    run = site.folder / f"straight-{place}"
    process = site.start(run, place, resume=False)
    began_s = wait_for(process, lambda: has_begun(run))
    wait_for(process, lambda: False)
    ended_s = time.monotonic()
    if process.returncode:
        raise SystemExit(explain(run, process.returncode))
    bench.say(f"{place}: a run of {NUM_STEPS} steps took {format_ns((ended_s - began_s) * 1e9)}")
    last = run / f"checkpoint-{NUM_STEPS}"
    return Reference(
        folder=run,
        ending=read_ending(run),
        training_s=ended_s - began_s,
        saved_bytes=stored_bytes([last]),
        model_bytes=stored_bytes([run / "model.safetensors"]),
    )


def _kill_and_resume(
    bench: Bench,
    site: Site,
    reference: Reference,
    place: Place,
    index: int,
    moments: Sequence[Moment],
    tally: Tally,
) -> None:
    run = site.folder / f"killed-{index}"
    for number, moment in enumerate(moments):
        process = site.start(run, place, resume=number > 0)
        kill_at(process, run, moment, reference)
        if process.returncode == -signal.SIGKILL:
            steps, saving = last_step(run), is_saving(run)
            tally.during_saves += saving
            tally.kills.append(f"{place} {moment}")
            newest = max((s for s in saved_steps(run)), default=0)
            tally.most_lost = max(tally.most_lost, steps - newest)
            bench.say(
                f"{place}: killed after step {steps}{', while saving' if saving else ''};"
                f" newest checkpoint {newest or 'none'}"
            )
        else:
            bench.say(f"{place}: {moment} came too late, exit {process.returncode}")
    tally.trials += 1
    code = _finish(site, run, place)
    tally.resumed += code == 0
    if code:
        bench.say(explain(run, code))
        return
    tally.same += is_same(bench, run, reference)


def _change_plan(
    bench: Bench,
    site: Site,
    references: Mapping[Place, Reference],
    place: Place,
    draw: random.Random,
) -> bool:
    run = site.folder / f"changed-{place}"
    process = site.start(run, place, resume=False)
    kill_at(process, run, ByProgress(share=draw.uniform(0.3, 0.8)), references[place])
    other = OTHER[place]
    bench.say(f"{place}: killed after step {last_step(run)}, resumed under the plan for {other}")
    code = _finish(site, run, place, plan=references[other].folder / "plan.json")
    if code:
        bench.say(explain(run, code))
        return False
    return is_same(bench, run, references[place])


def _stop_and_resume(
    bench: Bench,
    site: Site,
    references: Mapping[Place, Reference],
    place: Place,
    draw: random.Random,
) -> bool:
    run = site.folder / f"stopped-{place}"
    process = site.start(run, place, resume=False)
    share = draw.uniform(0.1, 0.6)
    kill_at(process, run, ByProgress(share=share), references[place], number=signal.SIGTERM)
    bench.say(f"{place}: SIGTERM after step {last_step(run)}, exit {process.returncode}")
    stopped = process.returncode == STOPPED and max(saved_steps(run)) == last_step(run)
    code = _finish(site, run, place)
    if code:
        bench.say(explain(run, code))
        return False
    return stopped and is_same(bench, run, references[place])


def _measure_kept(
    bench: Bench,
    site: Site,
    references: Mapping[Place, Reference],
    draw: random.Random,
    num_kills: int,
) -> None:
    """Kill runs that save nothing by hand; stop some; time what keeping costs."""
    most_lost: dict[Place, int] = dict.fromkeys(PINS, 0)
    struck, same, most_stop_s, num_stops = 0, 0, 0.0, 0
    for index in range(num_kills):
        place: Place = "memory" if index % 2 else "disk"
        run = site.folder / f"kept-{index}"
        process = site.start(run, place, resume=False, settings=keep(place))
        kill_at(process, run, ByProgress(share=draw.random()), references[place])
        struck += process.returncode == -signal.SIGKILL
        finished, kept = last_step(run), kept_step(site)
        most_lost[place] = max(most_lost[place], finished - kept)
        bench.say(f"{place}: killed after step {finished}, kept {kept}, nothing saved")
        code = _finish(site, run, place, settings=keep(place))
        if code:
            bench.say(explain(run, code))
        same += not code and is_same(bench, run, references[place])
    for place in PINS:
        run = site.folder / f"kept-stopped-{place}"
        process = site.start(run, place, resume=False, settings=keep(place))
        wait_for(process, lambda run=run: last_step(run) >= NUM_STEPS // 3)
        began_s = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        most_stop_s = max(most_stop_s, wait_for(process, lambda: False) - began_s)
        finished, kept = last_step(run), kept_step(site)
        bench.say(f"{place}: SIGTERM after step {finished}, kept {kept}, {process.returncode}")
        stopped = process.returncode == STOPPED and kept == finished and not saved_steps(run)
        code = _finish(site, run, place, settings=keep(place))
        num_stops += stopped and not code and is_same(bench, run, references[place])
    bench.add(
        "Every step a checkpoint: nothing saved until the end",
        [
            exactly("kills that struck", struck, num_kills),
            exactly("resumed with the same bits", same, num_kills),
            at_most("most steps lost, all on disk", most_lost["disk"], KEEP_STEPS["disk"]),
            at_most("most steps lost, all in memory", most_lost["memory"], KEEP_STEPS["memory"]),
            exactly("SIGTERM: exit 75, no checkpoint, resumed, same bits", num_stops, len(PINS)),
            at_most("longest way from SIGTERM to the end, s", most_stop_s, STOP_LIMIT_S),
            *[
                shown(f"step with steps kept, all on {place}, of one without", ratio)
                for place, ratio in _time_keeping(bench, site).items()
            ],
        ],
    )


def _time_keeping(bench: Bench, site: Site) -> Mapping[Place, float]:
    """The median step of runs that keep steps, over that of runs that do not."""
    ratios: dict[Place, float] = {}
    for place in PINS:
        times: dict[bool, list[float]] = {False: [], True: []}
        for index in range(NUM_QUICK_TIMED if bench.quick else NUM_TIMED):
            for keeps in (False, True):
                run = site.folder / f"timed-{place}-{keeps}-{index}"
                settings = keep(place) if keeps else (f"save_steps={NUM_STEPS}",)
                times[keeps].append(_time_steps(site, run, place, settings))
        medians = {keeps: statistics.median(found) for keeps, found in times.items()}
        for keeps, median in medians.items():
            bench.say(
                f"{place}: a step takes {format_ns(median * 1e9)}"
                f" with steps {'kept' if keeps else 'not kept'}"
            )
        ratios[place] = medians[True] / medians[False]
    return ratios


def _time_steps(site: Site, run: Path, place: Place, settings: Sequence[str]) -> float:
    """Seconds of a step, between the second one and the last but one of a run."""
    process = site.start(run, place, resume=False, settings=settings)
    began_s = wait_for(process, lambda: last_step(run) >= 2)
    first = last_step(run)
    ended_s = wait_for(process, lambda: last_step(run) >= NUM_STEPS - 1)
    last = last_step(run)
    wait_for(process, lambda: False)
    if process.returncode:
        raise SystemExit(explain(run, process.returncode))
    return (ended_s - began_s) / (last - first)


def _finish(
    site: Site,
    run: Path,
    place: Place,
    *,
    plan: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    process = site.start(run, place, resume=True, plan=plan, settings=settings)
    wait_for(process, lambda: False)
    return int(process.returncode)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--kills", type=int, help="how often runs with checkpoints are killed")
    parser.add_argument("--kept-kills", type=int, help="how often runs that keep steps are killed")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments")


if __name__ == "__main__":
    sys.exit(run_bench("crash", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
