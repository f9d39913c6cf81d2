"""TRL's GRPO as a process: it reads one JSON command per line from standard input, and writes one
JSON answer per line to standard output.

Runs in the environment that `make peers` makes. Slipstream starts it
(`slipstream/bench/peer_process.py`); from Slipstream it only loads the scorers, and the tool of the
lookup task. It computes only between a command and its answer.

    {"op": "parity", "model": FOLDER, "batch": FILE, "gradients": FILE, "threads": 2,
     "settings": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": null, "delta": null,
                  "scale_rewards": "group", "max_completion_length": 64}}
        batch: a JSON file with one entry per completion, `group_size` consecutive ones per prompt:
        {"group_size": n, "prompt_ids": [[ids]], "completion_ids": [[ids]], "rewards": [..],
         "old_log_probs": [[..]] or null (the model's own),
         "masks": [[..]] (1: sampled, 0: of a tool) or null (no tools)}
    -> {"ok": true, "loss": .., "advantages": [..]}
        computed in fp32; the file `gradients` then has the gradients of all weights, by name

    {"op": "updates", "model": FOLDER, "batches": [FILE, ..], "weights": FILE, "threads": 2,
     "settings": as for `begin`, without max_steps, prompts_per_step and group_size}
        batches: files as for `parity`, all of one size; one optimizer step per batch, in fp32
    -> {"ok": true, "grad_norms": [..]}
        norms before clipping; the file `weights` then has all weights, by name

    {"op": "begin", "task": "countdown", "model": FOLDER, "prompts": FILE, "precision": "float32",
     "threads": 2,
     "settings": {"prompts_per_step": 4, "group_size": 4, "max_completion_length": 456,
                  "max_steps": 100, "lr": 1.5e-4, "warmup_steps": 5, "betas": [0.9, 0.99],
                  "eps": 1e-8, "weight_decay": 0.0, "grad_clip": 1.0, "seed": 1,
                  "loss_type": "dapo", "epsilon": 0.2, "scale_rewards": "group",
                  "max_tool_calling_iterations": 11 (default: no limit)}}
        task: a key of `TASKS`
        prompts: JSON lines {"messages": [..], "ids": [..], "columns": {..}}, used in this order;
            the columns are those of the task's function
        precision: a key of `PRECISIONS`
    -> {"ok": true, "seconds": .., "versions": {..}}
    {"op": "step"}
    -> {"ok": true, "seconds": .., "generation_seconds": .., "reward_seconds": ..,
        "update_seconds": .., "cpu_seconds": .., "tokens": n, "longest": n, "turns": n,
        "rewards": [..]}
        one optimizer step, including its rollout; `tokens` counts sampled tokens and `turns` those
        of the policy; generation includes the tools; update_seconds is the time without generation
        and rewards
    {"op": "finish", "folder": FOLDER}
    -> {"ok": true}
        the folder then has the model, as transformers saves it
    {"op": "quit"}

An answer to a command that failed is {"ok": false, "error": ".."}.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PRECISIONS = {
    # dtype of weights and optimizer, autocast to bf16
    "float32": ("float32", False),
    # Like Slipstream: weights and optimizer in fp32, products in bf16.
    "bfloat16-autocast": ("float32", True),
    # Weights, optimizer and everything else in bf16: less memory, but rounding loses small updates.
    "bfloat16-weights": ("bfloat16", False),
}

ROOT = Path(__file__).parents[2]
SCORER = ROOT / "slipstream" / "rewards" / "countdown.py"

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
"""How transformers finds the tool calls in a turn of the lookup task. TRL knows the templates of
some models only, and takes this description from a tokenizer that has one."""

Command = dict[str, Any]


def load_scorer() -> Callable[[Sequence[int], int, str], float]:
    """Slipstream's own scorer of answers, which returns 1.0 or 0.0."""
    spec = importlib.util.spec_from_file_location("countdown_scorer", SCORER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass in it looks up its module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return lambda numbers, target, text: float(module.verify(numbers, target, text).correct)


def settle(threads: int) -> None:
    """Set environment variables and threads. The libraries read them when they are imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        OMP_NUM_THREADS=str(threads),
    )
    import torch

    torch.set_num_threads(threads)


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, padding_side="left")


def arguments(
    output: str, *, dtype: str, bf16: bool, logging_steps: int = 1_000_000, **given: Any
) -> Any:
    """A GRPOConfig for a CPU; its defaults are for a GPU."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output,
        logging_steps=logging_steps,
        use_cpu=True,
        bf16=bf16,
        fp16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        gradient_accumulation_steps=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        model_init_kwargs={"dtype": dtype},
        **given,
    )


def optimizer_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of GRPOConfig for the `settings` of a training."""
    return {
        "max_completion_length": settings["max_completion_length"],
        "learning_rate": settings["lr"],
        "adam_beta1": settings["betas"][0],
        "adam_beta2": settings["betas"][1],
        "adam_epsilon": settings["eps"],
        "weight_decay": settings["weight_decay"],
        "max_grad_norm": settings["grad_clip"],
        "loss_type": settings["loss_type"],
        "epsilon": settings["epsilon"],
        "scale_rewards": settings["scale_rewards"],
    }


def trainer_class(warmup: int) -> Any:
    """GRPOTrainer with Slipstream's warm-up, whose first learning rate is not 0."""
    from torch.optim.lr_scheduler import LambdaLR
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup))
            )
            return self.lr_scheduler

    return Trainer


def countdown(tokenizer: Any) -> dict[str, Any]:
    """Arguments of the trainer for the countdown task, whose rows have `numbers` and `target`."""
    scorer = load_scorer()

    def reward(
        completions: list[Any], numbers: list[Any], target: list[Any], **more: Any
    ) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return [scorer(*each) for each in zip(numbers, target, texts, strict=True)]

    return {"reward_funcs": reward}


def lookup(tokenizer: Any) -> dict[str, Any]:
    """Arguments of the trainer for the lookup task, whose rows have `answer`, `table` (JSON) and
    `cost`. Tool and scorer are Slipstream's own. Sets the tokenizer's response template."""
    sys.path.append(str(ROOT))
    from slipstream.data import lookup as task
    from slipstream.rewards.lookup import compute_score

    tokenizer.response_template = RESPONSE_TEMPLATE

    class Table:
        """The table of one rollout. TRL calls `reset` with its row; other methods are tools."""

        def reset(self, *, table: str, **row: Any) -> None:
            self.table = json.loads(table)
            self.calls = 0

        def look_up(self, name: str) -> str:
            """Look up the relations of a person.

            Args:
                name: The person's name.
            """
            found = task.look_up(self.table, name)
            # Only a call with a valid argument costs.
            self.calls += 1
            return found

    def reward(
        completions: list[Any],
        environments: list[Any],
        answer: list[str],
        cost: list[float],
        **more: Any,
    ) -> list[float]:
        scores = []
        for place, completion in enumerate(completions):
            turns = [message for message in completion if message["role"] == "assistant"]
            text = "\n".join(turn["content"] for turn in turns)
            score = compute_score(task.DATA_SOURCE, text, answer[place])["score"]
            scores.append(score - cost[place] * environments[place].calls)
        return scores

    return {"reward_funcs": reward, "environment_factory": Table}


TASKS = {"countdown": countdown, "lookup": lookup}


def as_rollout(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A given batch as the result of TRL's `rollout_func`."""
    found = {name: batch[name] for name in ("prompt_ids", "completion_ids")}
    if batch.get("masks") is not None:
        found["env_mask"] = batch["masks"]
    return {**found, "logprobs": None}


def parity(
    *, model: str, batch: str, gradients: str, threads: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """TRL's loss and gradients for a given batch. TRL computes everything after the rewards."""
    settle(threads)
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from trl import GRPOTrainer

    given = json.loads(Path(batch).read_text())
    count, group_size = len(given["rewards"]), given["group_size"]
    # Rows of the data set only hold an index; hooks of TRL return the batch's values for it.
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(count // group_size)])

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return as_rollout(given)

    def reward(prompts: list[Any], **more: Any) -> list[float]:
        return list(given["rewards"])

    with TemporaryDirectory() as output:
        args = arguments(
            output,
            dtype="float32",
            bf16=False,
            per_device_train_batch_size=count,
            num_generations=group_size,
            max_steps=1,
            **settings,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=rows,
            processing_class=load_tokenizer(model),
            rollout_func=rollout,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        repeated = [{"prompt": str(i // group_size)} for i in range(count)]
        inputs = trainer._generate_and_score_completions(repeated)
        if given["old_log_probs"] is not None:
            width = inputs["completion_ids"].shape[1]
            inputs["old_per_token_logps"] = torch.tensor(
                [[*row, *[0.0] * (width - len(row))] for row in given["old_log_probs"]]
            )
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        found = {
            name: weight.grad.contiguous()
            for name, weight in trainer.model.named_parameters()
            if weight.grad is not None
        }
    save_file(found, gradients)
    return {"loss": loss.item(), "advantages": inputs["advantages"].tolist()}


def updates(
    *,
    model: str,
    batches: Sequence[str],
    weights: str,
    threads: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """TRL's weights after one optimizer step per batch, with TRL's loss, clipping and optimizer,
    and Slipstream's warm-up."""
    settle(threads)
    from datasets import Dataset
    from safetensors.torch import save_file

    given = [json.loads(Path(batch).read_text()) for batch in batches]
    count, group_size = len(given[0]["rewards"]), given[0]["group_size"]
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(len(given) * count // group_size)])
    made: list[dict[str, Any]] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made.append(given[len(made)])
        return as_rollout(made[-1])

    def reward(prompts: list[Any], **more: Any) -> list[float]:
        return list(made[-1]["rewards"])

    with TemporaryDirectory() as output:
        args = arguments(
            output,
            dtype="float32",
            bf16=False,
            logging_steps=1,
            per_device_train_batch_size=count,
            num_generations=group_size,
            max_steps=len(given),
            **optimizer_arguments(settings),
        )
        trainer = trainer_class(settings["warmup_steps"])(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=rows,
            processing_class=load_tokenizer(model),
            rollout_func=rollout,
        )
        trainer.train()
        if len(made) != len(given):
            raise ValueError(f"TRL took {len(made)} of {len(given)} batches")
        norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        found = {
            name: weight.detach().contiguous() for name, weight in trainer.model.named_parameters()
        }
    save_file(found, weights)
    return {"grad_norms": norms}


class Clocks:
    """Seconds of the parts of a step, and lengths, turns and rewards of its rollout."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.parts = {"generation": 0.0, "reward": 0.0}
        self.lengths: list[int] = []
        self.turns = 0
        self.rewards: list[float] = []
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def timed(self, part: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.parts[part] += time.perf_counter() - start

    def answer(self) -> dict[str, Any]:
        seconds, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return {
            "seconds": seconds,
            **{f"{part}_seconds": value for part, value in self.parts.items()},
            "update_seconds": seconds - sum(self.parts.values()),
            "cpu_seconds": cpu,
            "tokens": sum(self.lengths),
            "longest": max(self.lengths),
            "turns": self.turns,
            "rewards": self.rewards,
        }


def train(
    begin: Mapping[str, Any],
    commands: Iterator[Command],
    answer: Callable[[Mapping[str, Any]], None],
) -> None:
    """Train with the settings in `begin`: one step per command `step`, until `finish`."""
    started = time.perf_counter()
    settle(begin["threads"])
    dtype, bf16 = PRECISIONS[begin["precision"]]
    from datasets import Dataset
    from transformers import TrainerCallback

    clocks = Clocks()
    settings = begin["settings"]
    warmed = trainer_class(settings["warmup_steps"])

    class Trainer(warmed):  # type: ignore[misc, valid-type, unused-ignore]
        """The trainer with clocks around generation and rewards."""

        def _generate(self, prompts: list[Any]) -> Any:
            made = clocks.timed("generation", lambda: warmed._generate(self, prompts))
            _, ids, masks, completions = made[:4]
            clocks.lengths += map(len, ids) if masks is None else map(sum, masks)
            messages = itertools.chain.from_iterable(completions)
            clocks.turns += sum(message["role"] == "assistant" for message in messages)
            return made

        def _calculate_rewards(self, *args: Any, **more: Any) -> Any:
            found = clocks.timed("reward", lambda: warmed._calculate_rewards(self, *args, **more))
            clocks.rewards += found[:, 0].tolist()
            return found

    class StepByCommand(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Waits for a command before each step and answers after it."""

        folder: str | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            answer({"seconds": time.perf_counter() - started, "versions": versions()})
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            answer(clocks.answer())
            self._wait(control)

        def _wait(self, control: Any) -> None:
            command = next(commands)
            if command["op"] == "finish":
                self.folder = command["folder"]
                control.should_training_stop = True
            elif command["op"] != "step":
                raise ValueError(f"{command['op']!r} is not possible now; give step or finish")
            clocks.restart()

    tokenizer = load_tokenizer(begin["model"])
    of_task = TASKS[begin["task"]](tokenizer)
    with TemporaryDirectory() as output:
        args = arguments(
            output,
            dtype=dtype,
            bf16=bf16,
            per_device_train_batch_size=settings["prompts_per_step"] * settings["group_size"],
            num_generations=settings["group_size"],
            max_steps=settings["max_steps"],
            seed=settings["seed"],
            max_tool_calling_iterations=settings.get("max_tool_calling_iterations"),
            **optimizer_arguments(settings),
        )
        steps = StepByCommand()
        trainer = Trainer(
            model=begin["model"],
            args=args,
            train_dataset=Dataset.from_list(read_prompts(Path(begin["prompts"]), tokenizer)),
            processing_class=tokenizer,
            callbacks=[steps],
            **of_task,
        )
        trainer.train()
        if steps.folder is None:
            raise ValueError(f"all {settings['max_steps']} steps are done; the next must be finish")
        # In fp32, like Slipstream's own checkpoints; the evaluator chooses its dtype.
        trainer.model.float().save_pretrained(steps.folder)
        tokenizer.save_pretrained(steps.folder)
    answer({})


def read_prompts(file: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of a data set. Raises ValueError if this tokenizer returns other ids for a prompt."""
    rows = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        entry = json.loads(line)
        ids = tokenizer.apply_chat_template(
            entry["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if list(ids) != entry["ids"]:
            raise ValueError(f"{file}, line {number}: the ids of the prompt are {ids} here")
        rows.append({"prompt": entry["messages"], **entry["columns"]})
    return rows


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")}


def main() -> None:
    # The libraries also print to standard output, so it is redirected to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands = (json.loads(line) for line in sys.stdin)

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps({"ok": True, **content}) + "\n")

    for command in commands:
        op = command.pop("op")
        if op == "quit":
            return
        try:
            if op == "parity":
                answer(parity(**command))
            elif op == "updates":
                answer(updates(**command))
            elif op == "begin":
                train(command, commands, answer)
            else:
                known = "parity, updates, begin and quit"
                raise ValueError(f"{op!r} is not possible now; the commands are {known}")
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answers.write(json.dumps({"ok": False, "error": message}) + "\n")


if __name__ == "__main__":
    main()
