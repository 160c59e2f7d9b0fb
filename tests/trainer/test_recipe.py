"""Recipes: coercion, renamed keys, keys that the plan decides, and errors that list every key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.errors import FileFormatError, RecipeError
from packhorse.optim.groups import assign_groups, hyperparameters
from packhorse.optim.optimizers import SGD, AdamW
from packhorse.trainer.batch_cut import cut_batch
from packhorse.trainer.recipe_files import (
    format_recipe,
    format_schema,
    load_recipe,
    parse_recipe,
)

ROOT = Path(__file__).resolve().parents[2]
LEAST = "model_name_or_path: m\ntrain_data: a.jsonl\noutput_dir: out\n"


def read(more: str, *settings: str):
    return parse_recipe(LEAST + more, settings)


def test_the_quickstart_reads_and_what_is_written_reads_back_equal():
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml").recipe
    assert parse_recipe(format_recipe(recipe)).recipe == recipe
    assert recipe.granted.device_bytes == 1 << 30


def test_a_resolved_recipe_of_sgd_reads_back():
    recipe = read("optim: sgd\nsgd_momentum: 0.9\n").recipe
    assert parse_recipe(format_recipe(recipe)).recipe == recipe
    assert recipe.optimizer == SGD(lr=1e-5, momentum=0.9)


def test_numbers_that_yaml_reads_as_text_are_numbers():
    recipe = read("learning_rate: 1e-4\nadam_epsilon: 1e-6\n").recipe
    assert recipe.optimizer == AdamW(lr=1e-4, eps=1e-6, weight_decay=0.0)


def test_settings_override_nested_keys_and_do_not_need_the_parent():
    recipe = read("budget: {device: 1GiB}\n", "plan.recompute=all", "budget.device=2GiB").recipe
    assert recipe.pins.recompute == ("*",)
    assert recipe.granted.device_bytes == 2 << 30


def test_renamed_keys_warn():
    loaded = read("max_seq_length: 128\nwarmup_ratio: 0.1\noptim: adamw_torch\nmax_steps: -1\n")
    assert (loaded.recipe.max_length, loaded.recipe.warmup_steps) == (128, 0.1)
    assert loaded.recipe.max_steps is None
    assert any("max_seq_length is called max_length here" in text for text in loaded.warnings)
    assert len(loaded.warnings) == 4


def test_strategies_are_translated():
    loaded = read("eval_strategy: no\nsave_strategy: steps\n")
    assert loaded.recipe.eval_steps is None
    with pytest.raises(RecipeError, match="eval_strategy"):
        read("eval_strategy: epoch\n")


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("max_seq_length: 512\ncutoff_len: 1024\n", "max_seq_length: it is called max_length"),
        ("max_length: 512\ncutoff_len: 512\n", "cutoff_len: it is called max_length here"),
        ("eval_strategy: no\neval_steps: 100\n", "eval_strategy: no contradicts eval_steps: 100"),
        ("eval_steps: 100\neval_strategy: no\n", "eval_strategy: no contradicts eval_steps: 100"),
        ("evaluation_steps: 9\neval_strategy: no\n", "no contradicts evaluation_steps: 9"),
    ],
)
def test_keys_that_contradict_each_other_are_errors(text: str, bad: str):
    with pytest.raises(RecipeError) as caught:
        read(text)
    assert bad in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "model_name_or_path: ''",
        "tokenizer_name_or_path: ''",
        "train_data: ''",
        "train_data: [a, '']",
        "data_cache: ''",
        "output_dir: ''",
        "num_train_epochs: 1e308",
        "max_steps: 1000000000000000000000",
    ],
)
def test_empty_texts_and_endless_runs_are_refused(line: str):
    content = {"model_name_or_path": "m", "train_data": "d", "output_dir": "o"}
    key, _, value = line.partition(": ")
    with pytest.raises(RecipeError, match=rf"wrong: {key}"):
        parse_recipe("\n".join(f"{k}: {v}" for k, v in {**content, key: value}.items()))


def test_a_setting_inside_of_a_text_is_refused():
    text = "budget: device=1GiB,disk=2GiB\n"
    with pytest.raises(RecipeError, match=r"budget\.disk cannot be set: the recipe's budget is"):
        read(text, "budget.disk=3GiB")
    assert read(text, "budget=device=3GiB").recipe.granted.device_bytes == 3 << 30


def test_several_scratch_folders_are_granted_each_its_own():
    text = "budget: {disk: [{path: /a, size: 1GiB}, {path: /b}]}\n"
    disks = read(text).recipe.granted.disks
    assert [(disk.path, disk.size_bytes) for disk in disks] == [("/a", 1 << 30), ("/b", None)]
    with pytest.raises(RecipeError, match="named 2 times"):
        read("budget: {disk: [{path: /a}, {path: /a}]}\n")


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("gradient_checkpointing: true", "recompute"),
        ("deepspeed: ds.json", "optimizer: disk"),
        ("fsdp: full_shard", "parameters: disk"),
        ("activation_offloading: true", "activations: offload"),
    ],
)
def test_what_the_plan_decides_names_the_pin(key: str, names: str):
    with pytest.raises(RecipeError) as caught:
        read(key + "\n")
    assert names in str(caught.value)


def test_every_bad_key_is_listed_with_the_nearest():
    text = (
        "learning_rat: 1\nfsdp: x\nmax_length: abc\nbudget: {devic: 1GiB}\nplan: {recomput: all}\n"
    )
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    message = str(caught.value)
    for part in (
        "8 keys of the recipe are wrong",
        "learning_rat: there is no such key -> did you mean learning_rate?",
        "max_length: 'abc'",
        "budget.devic: there is no such key -> did you mean device?",
        "the nearest choice is 'recompute'",
        "model_name_or_path: it is missing",
    ):
        assert part in message


def test_options_without_effect_are_errors():
    with pytest.raises(RecipeError, match="together"):
        read("sgd_momentum: 0.9\n")
    with pytest.raises(RecipeError, match="together"):
        read("eval_data: b.jsonl\neval_split: 0.1\n")


def test_parameter_groups_have_their_own_rate_and_decay():
    text = (
        "learning_rate: 1e-4\nparameter_groups:\n"
        "- {patterns: ['*.embed_tokens.*', 'lm_head.*'], learning_rate: 1e-5, weight_decay: 0}\n"
        "- {patterns: '*.layers.0.*', weight_decay: 0.5}\n"
    )
    recipe = read(text).recipe
    assert parse_recipe(format_recipe(recipe)).recipe == recipe
    optimizer = recipe.optimizer
    names = (
        "model.embed_tokens.weight",
        "model.layers.0.bias",
        "model.layers.1.weight",
        "lm_head.w",
    )
    first, second, rest, head = assign_groups(names, optimizer).values()
    assert (first, second, rest) == (head, "group 2", "all")
    assert hyperparameters(optimizer, first).lr == 1e-5
    assert hyperparameters(optimizer, second).lr == 1e-4
    assert hyperparameters(optimizer, second).weight_decay == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parameter_groups: [{learning_rate: 1}]\n", "parameter_groups.0.patterns: it is missing"),
        ("parameter_groups: [{patterns: [], weight_decay: 1}]\n", "parameter_groups.0.patterns"),
        ("parameter_groups: [{patterns: a, weight_deca: 1}]\n", "did you mean weight_decay?"),
        (
            "learning_rate: 0\nparameter_groups: [{patterns: a, learning_rate: 1}]\n",
            "whose schedule it would follow",
        ),
    ],
)
def test_wrong_parameter_groups_are_refused(text: str, words: str):
    with pytest.raises(RecipeError) as caught:
        read(text)
    assert words in str(caught.value)


def test_a_file_of_another_kind_or_version_is_refused():
    with pytest.raises(FileFormatError, match="packhorse/plan"):
        read("kind: packhorse/plan\n")
    with pytest.raises(FileFormatError, match="version 7"):
        read("version: 7\n")


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(RecipeError, match="key=value"):
        read("", "learning_rate")


@pytest.mark.parametrize(
    ("more", "rows", "cut"),
    [
        ("", 32, None),
        ("global_batch_size: 12\n", 12, None),
        ("global_batch_size: 12\nper_device_train_batch_size: 3\n", 12, 3),
        ("global_batch_size: 12\ngradient_accumulation_steps: 3\n", 12, 4),
        ("per_device_train_batch_size: 3\ngradient_accumulation_steps: 5\n", 15, 3),
        ("per_device_train_batch_size: 3\n", 3, 3),
        ("global_batch_size: 12\nplan: {microbatch_rows: 2}\n", 12, 2),
    ],
)
def test_batches_are_cut(more: str, rows: int, cut: int | None):
    found = cut_batch(read(more).recipe)
    assert (found.global_rows, found.microbatch_rows) == (rows, cut)


def test_batch_errors_show_each_factor_and_the_nearest_values():
    recipe = read("global_batch_size: 10\nper_device_train_batch_size: 4\n").recipe
    with pytest.raises(RecipeError) as caught:
        cut_batch(recipe, num_ranks=2)
    message = str(caught.value)
    assert "10 is no multiple of 8 = per_device_train_batch_size 4 x ranks 2" in message
    assert "8 or 16" in message
    assert "of per_device_train_batch_size: 1 or 5" in message
    three = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    with pytest.raises(RecipeError, match="10 is not 8 ="):
        cut_batch(read("global_batch_size: 10\n" + three).recipe)


def test_the_schema_describes_every_key():
    schema = json.loads(format_schema())
    described = {name for name, entry in schema["properties"].items() if "description" in entry}
    assert described >= set(read("").recipe.model_dump())


def test_recipes_load_without_torch():
    code = (
        "import sys, packhorse.trainer.recipe_files, packhorse.trainer.batch_cut;"
        "sys.exit(int('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src").returncode == 0
