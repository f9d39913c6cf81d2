"""Whole runs through the command line: data, engines, logs and files."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.algorithms import registry
from slipstream.checkpoint.state import huggingface_folder
from slipstream.cli import main
from slipstream.config.launch import program
from slipstream.config.validate import BUILT_IN_LOGGERS, BUILT_IN_TASKS
from slipstream.data import registry as tasks
from slipstream.data.tokenizer import build_tokenizer
from slipstream.metrics import loggers
from slipstream.metrics.loggers import read_jsonl
from slipstream.metrics.names import check_names
from slipstream.models.decoder import Decoder, PackedDecoder
from slipstream.training.optim import PolicyOptimizer
from tests.run.helpers import (
    ACTOR,
    ROLLOUT,
    metrics_of,
    policy,
    records_of,
    result_of,
    rl_only,
    steps_of,
    tiny,
    write_reward,
)

INIT = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> Path:
    """The folder of a run of SFT and RL with all loggers that need no account."""
    folder = tmp_path_factory.mktemp("run") / "run"
    line = tiny(
        folder,
        "trainer.logger=[console,file,tensorboard]",
        f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=1",
        f"{ROLLOUT}.val_kwargs.n=2",
        "trainer.test_freq=1",
        reward=reward,
    )
    assert main(line) == 0
    return folder


def scalars(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics that TensorBoard shows, by step."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    shown: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                (number,) = value.tensor.float_val
                shown.setdefault(event.step, {})[value.tag] = number
    return shown


def test_metrics_are_documented_and_equal_in_all_loggers(run: Path) -> None:
    for root, first in ((run / "sft", 1), (run, 0)):
        lines = dict(read_jsonl(root / "metrics.jsonl"))
        assert sorted(lines) == list(range(first, 3))
        shown = scalars(root / "tensorboard" / "metrics")
        for step, metrics in lines.items():
            check_names(metrics)
            assert shown[step] == pytest.approx(metrics, rel=1e-6)
    last = dict(read_jsonl(run / "metrics.jsonl"))[2]
    for name in (
        "critic/score/mean",
        "critic/rewards/mean",
        "critic/advantages/max",
        "actor/pg_loss",
        "response_length/p90",
        "rollout/tokens_per_second",
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/step",
        "timing_s/testing",
        "timing_s/sync",
        "timing_s/dump_rollout_generations",
        "timing_per_token_ms/gen",
        "perf/throughput",
        "training/rollout_log_probs_bitwise_equal",
        "val-core/countdown/acc/mean@2",
        "val-aux/countdown/acc/mean@2/ci_low",
    ):
        assert name in last


def test_models_are_created_and_used_on_one_thread(
    tmp_path: Path, reward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second thread would start a second OpenMP team, and both would be slow.
    seen: dict[str, set[int]] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, watched)

    watch(Decoder, "init_weights")
    watch(Decoder, "pack")
    watch(PackedDecoder, "forward")
    watch(PolicyOptimizer, "step")
    kl = (f"{ACTOR}.use_kl_loss=true", "trainer.total_training_steps=1")
    assert main(tiny(tmp_path / "run", *kl, reward=reward)) == 0
    assert len(seen) == 4
    assert len(set.union(*seen.values())) == 1


def test_rollouts_and_validations_are_recorded_per_sample(run: Path) -> None:
    rollouts = records_of(run / "rollouts")
    assert list(rollouts) == ["1.jsonl", "2.jsonl"]
    for step, records in enumerate(rollouts.values(), start=1):
        assert [(r["group"], r["index"]) for r in records] == [
            (2 * step - 2 + group, index) for group in (0, 1) for index in (0, 1)
        ]
        for record in records:
            assert record["step"] == step
            assert len(record["log_probs"]) == len(record["response_ids"])
            assert record["versions"] == [step - 1]
            words = record["output"].split()
            words = words[:-1] if record["stop_reason"] == "eos" else words
            assert record["text"] == " ".join(words)
            assert record["score"] == pytest.approx(len(set(words)) / 8 + len(words) % 3)
    validations = records_of(run / "validation")
    assert list(validations) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert {len(records) for records in validations.values()} == {4 * 2}
    assert [r["group"] for r in validations["0.jsonl"]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_eval_gives_the_validation_results_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = dict(read_jsonl(run / "metrics.jsonl"))
    for checkpoint, step in ((run, 2), (run / "global_step_2", 2), (run / "sft", 0)):
        output = tmp_path / "responses.jsonl"
        assert main(["eval", "--checkpoint", str(checkpoint), "--output", str(output)]) == 0
        printed = capsys.readouterr().out
        core = "val-core/countdown/acc/mean@2"
        assert f"{core:<48} {written[step][core]:.4f}" in printed
        assert re.search(r"accuracy [\d.]+ \(95 %: [\d.]+ to [\d.]+\) on 4 held-out", printed)
        recorded = records_of(run / "validation")[f"{step}.jsonl"]
        responses = [json.loads(line) for line in output.read_text().splitlines()]
        assert [r["response_ids"] for r in responses] == [r["response_ids"] for r in recorded]


def test_eval_accepts_other_settings_and_fewer_problems(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", "--checkpoint", str(run), "--problems", "3", f"{ROLLOUT}.val_kwargs.n=1"]
    assert main(line) == 0
    assert "on 3 held-out problems" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_exported_model_has_the_same_logits_in_transformers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "deep" / "model"
    line = ["export", "--checkpoint", str(run), "--output", str(output), "--dtype", dtype]
    assert main(line) == 0
    assert str(output) in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(output)
    own = AutoModelForCausalLM.from_pretrained(
        huggingface_folder(run / "global_step_2"), dtype=model.dtype
    )
    assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("1 2 3 -> 6 :", return_tensors="pt")["input_ids"]
    assert (
        ids.tolist() == build_tokenizer()("1 2 3 -> 6 :", return_tensors="pt")["input_ids"].tolist()
    )
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own(ids).logits)
    assert not list(output.parent.glob(".*"))
    assert main(line) == 4, "a second export does not write over the first"
    # The dtype of an exported folder is kept by default.
    copy = ["export", "--checkpoint", str(output), "--output", str(tmp_path / "copy")]
    assert main(copy) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").dtype == model.dtype


def test_picture_is_drawn_and_the_last_lines_name_the_results(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(tiny(folder, "trainer.log_val_generations=2", reward=reward)) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("SFT, then RL on cpu in float32, 1 thread; engine embedded, exact")
    assert lines[1].startswith("an RL step: 2 prompts x 2 responses of at most 32 tokens")
    assert lines[2] == f"run folder: {folder}"
    for name, total in (("SFT", 2), ("RL", 2)):
        steps = [line for line in lines if re.match(rf"{name} \d+/{total} ", line)]
        assert len(steps) == 2, "one line a step, not two"
    # Validations before RL and after its last step, each with two responses.
    shown = [i for i, line in enumerate(lines) if "held-out problems, countdown" in line]
    assert [lines[i].split(":")[0] for i in shown] == ["before RL", "after RL step 2"]
    for i in shown:
        assert all(re.match(r" +[\d.]+ \| .+ => ", line) for line in lines[i + 1 : i + 3])
        assert "|" not in lines[i + 3]
    assert lines[-4] == f"picture      {folder / 'run.png'}"
    assert lines[-3] == f"report       {folder / 'report.html'}"
    assert lines[-1] == f"evaluate     {program()} eval --checkpoint {folder}"
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_hf_engine_trains_other_model_families(reward: Path, tmp_path: Path, family: str) -> None:
    line = tiny(
        tmp_path / "run",
        f"{ROLLOUT}.name=hf",
        f"{INIT}.init.family={family}",
        "trainer.logger=[file]",
        reward=reward,
    )
    assert main(line) == 0
    metrics = metrics_of(tmp_path / "run")[2]
    check_names(metrics)
    assert metrics["actor/grad_norm"] > 0
    # The engine has other kernels but the same policy: equal up to rounding.
    assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_embedded_and_hf_engine_give_the_same_rollouts(reward: Path, tmp_path: Path) -> None:
    steps = "trainer.total_training_steps=1"
    for name in ("embedded", "hf"):
        line = rl_only(tmp_path / name, steps, f"{ROLLOUT}.name={name}", reward=reward)
        assert main(line) == 0
    ours, theirs = (records_of(tmp_path / n / "rollouts")["1.jsonl"] for n in ("embedded", "hf"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["response_ids"] == other["response_ids"]
        assert one["log_probs"] == pytest.approx(other["log_probs"], abs=1e-4)


ALGORITHMS = {
    "KL loss": (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.optim.lr=0.01"),
    "KL in reward": ("algorithm.use_kl_in_reward=true", f"{ACTOR}.optim.lr=0.01"),
    "RLOO": ("algorithm.adv_estimator=rloo", f"{ACTOR}.entropy_coeff=0.01"),
    "DAPO": (
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.ppo_mini_batch_size=1",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.shuffle=true",
    ),
    "Dr. GRPO": (
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "small micro-batches": (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{INIT}.enable_gradient_checkpointing=true",
        f"{ACTOR}.log_prob_chunk_tokens=8",
    ),
    "Muon": (f"{ACTOR}.optim.optimizer=Muon", f"{ACTOR}.optim.muon_lr=0.02"),
    "truncated sampling": (f"{ROLLOUT}.top_k=20", f"{ROLLOUT}.temperature=0.8"),
    "over-sampling": (f"{ROLLOUT}.over_sample_rate=0.5", f"{ROLLOUT}.partial_rollout=true"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_settings_take_effect(reward: Path, tmp_path: Path, name: str) -> None:
    line = rl_only(tmp_path / "run", "trainer.logger=[file]", *ALGORITHMS[name], reward=reward)
    assert main([*line, "trainer.test_freq=9", "data.val_size=1"]) == 0
    metrics = metrics_of(tmp_path / "run")[2]
    check_names(metrics)
    assert math.isfinite(metrics["actor/pg_loss"])
    checks: dict[str, Callable[[dict[str, float]], bool]] = {
        "KL loss": lambda m: m["actor/kl_loss"] > 0 and m["actor/kl_coef"] == 0.001,
        "KL in reward": lambda m: (
            m["actor/reward_kl_penalty"] != 0 and m["critic/rewards/mean"] != m["critic/score/mean"]
        ),
        "DAPO": lambda m: m["actor/ppo_kl"] != 0,
        "Muon": lambda m: m["actor/muon_lr"] == 0.02 and m["actor/lr"] == 1e-4,
    }
    if name in checks:
        assert checks[name](metrics)


def test_micro_batch_size_does_not_change_the_trained_weights(reward: Path, tmp_path: Path) -> None:
    names = {"whole": [], "small": ALGORITHMS["small micro-batches"]}
    for name, overrides in names.items():
        assert main(rl_only(tmp_path / name, *overrides, reward=reward)) == 0
    whole, small = (policy(tmp_path / name, 2) for name in names)
    for key, value in whole.items():
        assert torch.allclose(value, small[key], atol=1e-5), key


def test_val_only_validates_without_training(
    run: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = tiny(tmp_path / "new", "trainer.val_only=true", reward=reward)
    assert main(line) == 0
    assert "validating freshly initialised weights" in capsys.readouterr().out
    assert steps_of(tmp_path / "new") == []
    assert list(records_of(tmp_path / "new" / "validation")) == ["0.jsonl"]
    start = [f"{INIT}.init=null", f"{INIT}.path={run}", "trainer.val_only=true"]
    assert main(rl_only(tmp_path / "other", *start, reward=reward)) == 0
    assert f"validating {run}/global_step_2/actor/huggingface" in capsys.readouterr().out


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_rows(source: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i} 2 3 -> 6 :"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]


def talk_rows(word: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i} 2 3 -> 6 :"},
                {"role": "assistant", "content": f"{word} answer {i}"},
            ]
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_sft_and_rl_draw_from_files_by_mixture_weights(
    run: Path, reward: Path, tmp_path: Path, suffix: str
) -> None:
    files = [write_rows(tmp_path / f"{name}.{suffix}", prompt_rows(name, 6)) for name in ("a", "b")]
    talks = [
        write_rows(tmp_path / f"{name}.{suffix}", talk_rows(word, 5))
        for name, word in (("c", "+"), ("d", "-"))
    ]
    line = tiny(
        tmp_path / "run",
        "data.task=null",
        f"data.train_files=[{files[0]},{files[1]}]",
        "data.mixture_weights=[3,1]",
        f"data.val_files={files[1]}",
        "data.val_max_samples=3",
        f"sft.train_files=[{talks[0]},{talks[1]}]",
        "sft.mixture_weights=[1,2]",
        "sft.save_freq=1",
        f"{INIT}.tokenizer_path={run}/global_step_2/actor/huggingface",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        reward=reward,
    )
    assert main(line) == 0
    records = [r for step in records_of(tmp_path / "run" / "rollouts").values() for r in step]
    assert len(records) == 4 * 2 * 2
    assert len({r["uid"].partition(":")[0] for r in records}) == 2, "both files are drawn from"
    assert metrics_of(tmp_path / "run")[4]["val-aux/b/num_prompts"] == 3
    # The position in both mixtures is part of the checkpoint.
    resumed = tiny(tmp_path / "again", *line[6:])
    checkpoint = f"trainer.resume_from_path={tmp_path}/run/global_step_2"
    assert main([*resumed, "trainer.resume_mode=resume_path", checkpoint]) == 0
    one, other = result_of(tmp_path / "run"), result_of(tmp_path / "again")
    assert one["rl data.json"] == other["rl data.json"]
    assert (
        one["rl actor/huggingface/model.safetensors"]
        == (other["rl actor/huggingface/model.safetensors"])
    )


def test_over_sampling_restores_carried_over_groups_on_resume(reward: Path, tmp_path: Path) -> None:
    def line(steps: int) -> list[str]:
        return rl_only(
            tmp_path / "run",
            f"{ROLLOUT}.over_sample_rate=1",
            f"{ROLLOUT}.partial_rollout=true",
            f"trainer.total_training_steps={steps}",
            "trainer.logger=[file]",
            reward=reward,
        )

    assert main(line(2)) == 0
    data = json.loads((tmp_path / "run" / "global_step_2" / "data.json").read_text())
    carried = {group["index"] for group in data["rollouts"]["carried"]}
    assert len(carried) == 2
    assert main(line(4)) == 0
    records = records_of(tmp_path / "run" / "rollouts")
    groups = [sorted({r["group"] for r in step}) for step in records.values()]
    assert all(len(step) == 2 for step in groups)
    assert len({g for step in groups for g in step}) == 8, "no group is trained on twice"
    assert carried & {g for step in groups[2:] for g in step}, "those cut off went on"
    uids = {r["group"]: r["uid"] for step in records.values() for r in step}
    assert len(set(uids.values())) == 8
    for step in records.values():
        assert len(step) == 4
        assert all(r["status"] in ("completed", "truncated") for r in step)
        assert all(len(r["response_ids"]) <= 32 for r in step)


TASK = """
from slipstream.data.countdown import CountdownTask
from slipstream.data.registry import register_task
from slipstream.metrics.loggers import ConsoleLogger, register_logger

class Small(CountdownTask):
    name = "small"

register_task("small", Small)

@register_logger("mine")
def mine(context):
    (context.run_dir / "mine.txt").write_text(context.experiment_name)
    return ConsoleLogger()
"""


def test_external_lib_registers_a_task_and_a_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._TASKS))
    monkeypatch.setattr(loggers, "LOGGERS", dict(loggers.LOGGERS))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "tasks_of_mine.py").write_text(TASK)
    named = ("data.task=small", "trainer.logger=[file,mine]", "trainer.total_training_steps=1")
    line = [word for word in rl_only(tmp_path / "run") if not word.startswith("data.task=")]
    assert main([*line, *named]) == 2
    refusal = capsys.readouterr().err
    assert "data.task=small is not known (known: countdown, lookup, reasoning_gym)" in refusal
    assert "trainer.logger=mine is not known" in refusal
    assert main([*line, *named, f"{INIT}.external_lib=tasks_of_mine"]) == 0
    assert (tmp_path / "run" / "mine.txt").exists()
    assert metrics_of(tmp_path / "run")[1]["rollout/num_prompts"] > 0


def test_built_in_names_equal_those_of_the_registries() -> None:
    # A user's module of another test in this process may have registered more.
    assert set(BUILT_IN_TASKS) <= set(tasks.task_names())
    assert list(BUILT_IN_LOGGERS) == list(loggers.LOGGERS)


MODULE = """
from slipstream.algorithms import get_policy_loss_fn, register_policy_loss

@register_policy_loss("doubled")
def doubled(**given):
    loss, metrics = get_policy_loss_fn("vanilla")(**given)
    return 2 * loss, metrics
"""


def test_external_lib_registers_a_policy_loss(
    tmp_path: Path,
    reward: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(registry, "_POLICY_LOSSES", dict(registry._POLICY_LOSSES))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "losses_of_mine.py").write_text(MODULE)
    settings = (f"{ACTOR}.policy_loss.loss_mode=doubled", "trainer.total_training_steps=1")
    line = rl_only(tmp_path / "own", *settings, reward=reward)
    assert main(line) == 2
    assert "set actor_rollout_ref.model.external_lib to" in capsys.readouterr().err
    assert main([*line, f"{INIT}.external_lib=losses_of_mine"]) == 0
    plain = rl_only(tmp_path / "plain", settings[1], reward=reward)
    assert main(plain) == 0
    norms = [metrics_of(tmp_path / name)[1]["actor/grad_norm"] for name in ("own", "plain")]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4)
    assert main([*line, f"{INIT}.external_lib=losses_of_nobody"]) == 2
    assert "external_lib=losses_of_nobody does not import" in capsys.readouterr().err
