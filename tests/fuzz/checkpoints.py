"""Fuzz of checkpoints: odd values in the state files of a checkpoint that is otherwise valid.

    python -m tests.fuzz.checkpoints --count 400

Each input changes one value, entry or file of a checkpoint, and gives it a manifest that fits. All
changes are such that no run writes them. So each input must be refused with the file and, where a
value has changed, its name. At the end, the checkpoints without a change are restored.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor

from slipstream.algorithms.kl import AdaptiveKLController
from slipstream.checkpoint.files import crc32, files_below
from slipstream.checkpoint.manager import MANIFEST, TRACKER, CheckpointManager
from slipstream.checkpoint.saved import check_finite, restoring
from slipstream.checkpoint.state import (
    RunState,
    adapter_folder,
    cotraining_file,
    critic_folder,
    critic_optimizer_file,
    data_file,
    draft_folder,
    huggingface_folder,
    optimizer_file,
)
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.data.countdown import CountdownTask
from slipstream.data.data_buffer import DataBuffer, MixtureSource, TaskSource
from slipstream.data.dataset_source import DatasetSource
from slipstream.data.datasets import PromptReader
from slipstream.data.rlhf_dataset import DynamicGenDataset
from slipstream.data.samplers import PassRateSampler
from slipstream.deadlines import Deadlines
from slipstream.drafter.interval import IntervalTraining
from slipstream.errors import SlipstreamError
from slipstream.loops.draft_data import FreshResponses
from slipstream.loops.rl_batch import KLInReward
from slipstream.loops.sft import MixedSamples, ShuffledSamples
from slipstream.models.critic_io import load_critic
from slipstream.models.draft.files import save_draft_head
from slipstream.models.hf_io import WEIGHTS
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.models.lora_io import ADAPTER_WEIGHTS
from slipstream.run.draft_phase import restore_draft
from slipstream.run.snapshot import (
    LastPublished,
    Snapshots,
    check_complete,
    restore_rl,
    restore_sft,
)
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import Prompt, Sample, Segment, Status
from tests.data.helpers import char_tokenizer
from tests.data.test_rlhf_dataset import Harder, write
from tests.drafter.helpers import new_head, sequences, trainer, vocab_of
from tests.drafter.test_cotraining import cotraining
from tests.fuzz.harness import Result, command, try_input
from tests.inference.helpers import shared_decoder
from tests.rollout.samples import respond
from tests.rollout.test_manager import manager
from tests.training.helpers import make_batch, tiny_backend, tiny_decoder
from tests.training.test_critic import batch_of, critic

COUNT = 400

STEP = 2

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A run with a checkpoint at `STEP`. `restore` loads a checkpoint folder into its parts."""

    root: Path
    restore: Callable[[Path], object]
    state: Callable[[], Any]


def _snapshots(root: Path, phase: str, config: Config | None = None) -> Snapshots:
    return Snapshots(
        manager=CheckpointManager(root, keep=None),
        phase=phase,
        config=to_dict(config or Config()),
        save_tokenizer=lambda folder: None,
    )


def _trained(backend: SingleProcessBackend) -> SingleProcessBackend:
    for seed in range(STEP):
        backend.forward_backward(make_batch([9, 5], seed=seed)).wait()
        backend.optim_step().wait()
        backend.publish()
    return backend


def _sft(root: Path) -> Case:
    def stream() -> MixedSamples:
        demonstrations = [
            Sample(segments=[Segment.given("assistant", [1, 2, number], loss=1.0)])
            for number in range(5)
        ]
        parts = [(ShuffledSamples(demonstrations, seed=seed), 1.0) for seed in range(2)]
        return MixedSamples(parts, seed=0)

    backend, data, snapshots = _trained(tiny_backend()), stream(), _snapshots(root, "sft")
    for _ in range(4 * STEP):
        data.next_sample()
    snapshots.save(STEP, backend, {"stream": data.state_dict()})
    return Case(
        root,
        lambda folder: restore_sft(snapshots, folder, backend, data, _quiet),
        lambda: (backend.state_dict(), data.state_dict()),
    )


def _rl(root: Path, backend: SingleProcessBackend, supply: DataBuffer) -> Case:
    """RL with unfinished groups, a KL penalty, and engines with earlier weights."""
    config = Config()
    config = replace(
        config,
        trainer=replace(config.trainer, sync_every=2),
        algorithm=replace(config.algorithm, use_kl_in_reward=True),
    )
    snapshots, published = _snapshots(root, "rl", config), LastPublished()
    rollouts = manager(supply=supply, partial_rollout=True, greedy_baseline=True)
    rollouts._carried = rollouts._new_groups(2 * STEP)[-1:]
    unfinished = rollouts._carried[0].samples[0]
    respond(unfinished, [4, 5, 6]).status = Status.PENDING
    kl = KLInReward(AdaptiveKLController(0.1, 1.0, 10.0), "kl")
    anyio.run(published.update_weights, backend.publish(advance=False))
    data = {
        "data_buffer": supply.state_dict(),
        "rollouts": rollouts.state_dict(),
        "kl_in_reward": kl.state_dict(),
    }
    snapshots.save(STEP, backend, data, published)
    return Case(
        root,
        lambda folder: restore_rl(
            snapshots, folder, backend, supply, rollouts, _quiet, kl=kl, published=published
        ),
        lambda: (backend.state_dict(), supply.state_dict(), rollouts.state_dict()),
    )


def _list(root: Path) -> Case:
    prompts = [Prompt(uid=f"p{i}", ids=[1, 2, i]) for i in range(7)]
    return _rl(root, _trained(tiny_backend()), DataBuffer(prompts))


def _mixture(root: Path) -> Case:
    prompts = [Prompt(uid=f"p{i}", ids=[1, 2, i]) for i in range(3)]
    muon = OptimSettings(lr=1e-3, optimizer="Muon")
    mixture = MixtureSource([(prompts, 2.0), (TaskSource(CountdownTask(1)), 1.0)], seed=0)
    return _rl(root, _trained(tiny_backend(optim=muon)), DataBuffer(mixture))


def _dataset(root: Path) -> Case:
    root.mkdir()
    rows = write(root / "rows.jsonl", *"abcdef")
    dataset = DynamicGenDataset(
        rows, char_tokenizer(), {"max_prompt_length": 9}, generator=Harder()
    )
    sampler = PassRateSampler(dataset, {"seed": 1})
    reader = PromptReader(tokenizer=char_tokenizer(), max_prompt_length=9)
    source = DatasetSource(dataset, reader, seed=1, shuffle=True, sampler=sampler)
    decoder = tiny_decoder()
    add_lora(decoder, LoraConfig(rank=2, alpha=4, target_modules=("q_proj",)))
    return _rl(root, _trained(tiny_backend(decoder)), DataBuffer(source))


class _Engine:
    async def update_drafter(self, update: Any) -> None:
        """Take the head of a restored checkpoint."""


def _cotraining(root: Path) -> Case:
    made = cotraining(count=12, held_out=3)
    made.slice(vocab_of(shared_decoder()), step=1)
    compute = ComputeThread()
    interval = IntervalTraining(
        made,
        lambda: vocab_of(shared_decoder()),
        [_Engine()],
        compute,
        interval=1,
        notify=_quiet,
        deadlines=Deadlines(),
    )
    config = Config()
    train = replace(config.speculative.train, enable_drafter_training=True)
    config = replace(config, speculative=replace(config.speculative, train=train))
    settings = to_dict(config)
    state = RunState(step=STEP, phase="rl", threads=1, policy_version=6, config=settings)

    def save(folder: Path) -> None:
        interval.snapshot()(folder)
        data_file(folder).write_text("{}")
        state.save(folder)

    CheckpointManager(root, keep=None).save(STEP, save)

    def restore(folder: Path) -> None:
        check_complete(folder, {})
        anyio.run(interval.restore, folder)

    return Case(root, restore, made.state_dict)


def _critic(root: Path) -> Case:
    made = critic()
    for seed in range(STEP):
        made.update(batch_of([9, 5], seed)).wait()

    def save(folder: Path) -> None:
        made.save(critic_folder(folder))
        save_tree(critic_optimizer_file(folder), made.state_dict())
        data_file(folder).write_text("{}")
        RunState(step=STEP, phase="rl", threads=1).save(folder)

    def restore(folder: Path) -> None:
        RunState.load(folder)
        with restoring(critic_folder(folder)):
            check_finite(load_critic(critic_folder(folder)).named_parameters())
        with restoring(critic_optimizer_file(folder)):
            made.load_state_dict(load_tree(critic_optimizer_file(folder)))

    CheckpointManager(root, keep=None).save(STEP, save)
    return Case(root, restore, made.state_dict)


def _draft(root: Path) -> Case:
    decoder = shared_decoder()
    made = trainer(new_head(decoder))
    made.train([sequences(decoder, 4)] * STEP, vocab_of(decoder))
    supply = DataBuffer([Prompt(uid=f"p{i}", ids=[1, 2, i]) for i in range(7)])
    supply.get_prompts(9)
    source = FreshResponses(None, supply, samples=4, max_length=16)  # type: ignore[arg-type]

    def save(folder: Path) -> None:
        save_draft_head(made.head, draft_folder(folder))
        optimizer_file(folder).parent.mkdir()
        save_tree(optimizer_file(folder), made.state_dict())
        before = {"draft/accept_depth_1": 0.5, "draft/accept_length_1": 1.5}
        best = {"step": STEP, "metrics": before}
        data = {"source": source.state_dict(), "before": before, "policy": "a1", "best": best}
        data_file(folder).write_text(json.dumps(data))
        RunState(step=STEP, phase="draft", threads=1).save(folder)

    CheckpointManager(root, keep=None).save(STEP, save)
    return Case(
        root,
        lambda folder: restore_draft(folder, made, source, policy="p", policy_digest="a1"),
        lambda: (made.state_dict(), source.state_dict()),
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "sft": _sft,
    "list": _list,
    "mixture": _mixture,
    "dataset": _dataset,
    "cotraining": _cotraining,
    "critic": _critic,
    "draft": _draft,
}


def run(count: int) -> Result:
    """Try `count` checkpoints, and return the outcomes."""
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        cases = {kind: make(root / kind) for kind, make in CASES.items()}
        saved = {kind: _plain(case.state()) for kind, case in cases.items()}
        for number in range(count):
            kind = list(cases)[number % len(cases)]
            _try(result, number, kind, cases[kind], root / "odd")
            shutil.rmtree(root / "odd")
        for kind, case in cases.items():
            case.restore(case.root / f"global_step_{STEP}")
            if _plain(case.state()) != saved[kind]:
                result.wrong.append(f"{kind}: the checkpoint without a change is not restored")
    return result


def _try(result: Result, number: int, kind: str, case: Case, root: Path) -> None:
    draw = random.Random(f"checkpoint {number}")
    shutil.copytree(case.root, root)
    folder = root / f"global_step_{STEP}"
    change = draw.choice((_json, _json, _json, _json, _tree, _tree, _tree, _tree, _file, _manifest))
    what, named = change(draw, folder)
    name = f"{number} {kind} {what}".encode("ascii", "backslashreplace").decode()[:200]
    attempt = partial(_attempt, case, root, named)
    try_input(result, name, attempt, never_right=True)


def _attempt(case: Case, root: Path, named: tuple[str, ...]) -> str:
    try:
        folder = CheckpointManager(root, keep=None).resolve("auto", None)
        assert folder is not None
        case.restore(folder)
    except SlipstreamError as error:
        missing = [part for part in named if part not in str(error)]
        if missing:
            raise AssertionError(f"does not name {missing}: {error}") from None
        return str(error)
    return ""


def _json(draw: random.Random, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Change one value of state.json or data.json."""
    if data_file(folder).read_text() == "{}":
        # Co-training and critics are a part of a run, which reads these files.
        return _tree(draw, folder)
    path = folder / draw.choice(("state.json", "data.json"))
    value = json.loads(path.read_text())
    what, named, value = _changed(draw, value, float("nan"))
    # As Python writes them, which is not JSON: NaN and infinities.
    path.write_text(json.dumps(value))
    seal(folder)
    return f"{path.name} {what}", (path.name, *named)


def _tree(draw: random.Random, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Change one value of a file with tensors."""
    path = draw.choice(_tensor_files(folder))
    if path.name == WEIGHTS:
        return _weights(draw, folder, path)
    what, named, value = _changed(draw, load_tree(path), float("inf"))
    save_tree(path, value)
    seal(folder)
    return f"{path.name} {what}", (path.name, *named)


def _tensor_files(folder: Path) -> list[Path]:
    """The files with tensors that a resumed run reads."""
    found = set(folder.rglob("*.safetensors"))
    if adapter_folder(folder).exists():
        # The base weights come from the initial policy, the adapter from the training state.
        found -= {adapter_folder(folder) / ADAPTER_WEIGHTS, huggingface_folder(folder) / WEIGHTS}
    if cotraining_file(folder).exists():
        # The state of co-training has these weights, too.
        found -= {draft_folder(folder) / WEIGHTS}
    return sorted(found)


def _weights(draw: random.Random, folder: Path, path: Path) -> tuple[str, tuple[str, ...]]:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    odd = _odd_tensor(draw, tensors[name])
    # Weights of other dtypes are converted.
    if isinstance(odd, Tensor) and odd.dtype == tensors[name].dtype:
        tensors[name] = odd.clone()
    else:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    seal(folder)
    return f"{path.name} {name}", (path.parent.name,)


_CONTENTS = (
    b"", b"{", b"\0", b"\xff\xfe", b"[]", b"5", b"null", b"{}", b"[" * 5000 + b"]" * 5000,
    b'{"a": ' + b"9" * 6000 + b"}", b"\x80\x04K\x01.", b"PK\x03\x04", b"x" * 999,
)  # fmt: skip


def _file(draw: random.Random, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Remove, cut or replace a file."""
    states = [folder / "state.json", *_tensor_files(folder)]
    if data_file(folder).read_text() != "{}":
        states.append(data_file(folder))
    path = draw.choice(sorted(states))
    data = path.read_bytes()
    kind = draw.choice(("absent", "folder", "cut", "content"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "content":
        data = draw.choice(_CONTENTS)
        path.write_bytes(data)
        kind = repr(data[:20])
    seal(folder)
    name = path.parent.name if path.name == WEIGHTS else path.name
    return f"{path.name} {kind}", (name,)


def _manifest(draw: random.Random, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Change the manifest, or the file that names the latest checkpoint."""
    if draw.random() < 0.2:
        odd = draw.choice(("", "-1", "3", "2.0", "9" * 30, "two", "\0", "2 2", "null"))
        (folder.parent / TRACKER).write_text(odd)
        return f"tracker {odd!r}", (TRACKER,)
    path = folder / MANIFEST
    value = json.loads(path.read_text())
    kind = draw.choice(("entry", "file", "value"))
    if kind == "entry":
        key = draw.choice(sorted(value))
        del value[key]
        path.write_text(json.dumps(value))
        return f"manifest without {key}", (MANIFEST, key)
    name = draw.choice(_tensor_files(folder)).relative_to(folder).as_posix()
    name = draw.choice((name, "state.json", "data.json"))
    if kind == "file":
        del value["files"][name]
        path.write_text(json.dumps(value))
        return f"manifest without file {name}", (MANIFEST, name)
    # Other files may have been added later, so they may be missing in the manifest.
    entry = value["files"].pop(name)
    what, _, changed = _changed(draw, {**value, "files": {name: entry}}, float("nan"))
    if isinstance(changed.get("files"), dict):
        changed["files"] |= value["files"]
    path.write_text(json.dumps(changed))
    return f"manifest {what}", (folder.name,)


def seal(folder: Path) -> None:
    """Write a manifest that fits the files."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    path.unlink()
    manifest["files"] = {
        name: {"size": file.stat().st_size, "crc32": crc32(file)}
        for name, file in files_below(folder)
    }
    path.write_text(json.dumps(manifest))


_FREE = {
    "config", "versions", "messages", "prompt", "extra_info", "ground_truth", "metadata",
    "multi_modal", "response", "extra", "generated", "reward_parts",
}  # fmt: skip
"""Entries that hold any value of the user, or any text. Nothing can be wrong below them."""


def _places(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield all values inside `value` with their paths."""
    if isinstance(value, dict):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))[:3]
    else:
        return
    for key, part in parts:
        yield (*path, key), part
        if key not in _FREE:
            yield from _places(part, (*path, key))


def _changed(draw: random.Random, value: Any, special: float) -> tuple[str, tuple[str, ...], Any]:
    """Return what was changed, the name of the value, and a changed copy of `value`."""
    places = [place for place in _places(value) if place[0][-1] not in _FREE]
    # Depth by depth, because most values are lists of tokens.
    depth = draw.choice(sorted({len(path) for path, _ in places}))
    path, old = draw.choice([place for place in places if len(place[0]) == depth])
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    key = path[-1]
    if isinstance(inner, dict) and draw.random() < 0.15:
        del inner[key]
        return f"{_dotted(path)} is missing", (str(key),), changed
    odd = _odd(draw, path, old, special)
    if odd is None and key in ("trained_to", "newest_used"):
        odd = []  # None is known there
    inner[key] = odd
    if isinstance(old, dict) and isinstance(odd, dict):
        path = (*path, "before" if key == "before" else "unknown")
    name = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    return f"{_dotted(path)} = {str(odd)[:60]!r}", (name,), changed


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))


def _odd(draw: random.Random, path: Path_, old: Any, special: float) -> Any:
    """Return a value that cannot stand for `old`."""
    if isinstance(old, Tensor):
        return _odd_tensor(draw, old)
    if old is None:
        return draw.choice(([], True, [1], {"a": 1}))
    if isinstance(old, bool):
        return draw.choice((None, 2, "true", [], {}))
    if isinstance(old, int):
        # Nothing else tells how often a run was saved, and which seed it had.
        unknown = path[-1] in ("seed", "serial") or path[-2:] == ("key", 0)
        huge = () if unknown else (10**12, 2**62)
        return draw.choice((-1, *huge, 10**400, old + 0.5, str(old), None, True, [], {}, special))
    if isinstance(old, float):
        return draw.choice((special, -special, 1e308 * 10, str(old), None, True, [], {}))
    if isinstance(old, str):
        return draw.choice((None, 5, True, [], {}, [old]))
    if isinstance(old, list | tuple):
        return draw.choice((None, 5, "a", {}, {"a": 1}, [*old, None], True))
    return draw.choice((None, 5, "a", [], [1], True, {**old, "unknown": 1}))


def _odd_tensor(draw: random.Random, old: Tensor) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: old[None],
        lambda: old.reshape(-1)[:0],
        lambda: old.to(torch.int32 if old.is_floating_point() else torch.float32),
        lambda: old.to(torch.float64),
        lambda: None,
        lambda: 5,
        lambda: [1.0],
    ]
    if old.is_floating_point():
        kinds += [lambda: _with(old, float("nan")), lambda: _with(old, float("-inf"))] * 3
    else:
        kinds += [lambda: _with(old, -1)] * 2
    return draw.choice(kinds)()


def _with(old: Tensor, value: float) -> Tensor:
    changed = old.clone()
    changed.view(-1)[-1] = value
    return changed


def _plain(state: Any) -> Any:
    """A state that can be compared: tensors as bytes."""
    if isinstance(state, Tensor):
        return (str(state.dtype), tuple(state.shape), state.numpy().tobytes())
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(part) for part in state] if isinstance(state, list | tuple) else state


def _quiet(text: str) -> None:
    """Drop a note."""


if __name__ == "__main__":
    sys.exit(command("checkpoints", COUNT, run))
