"""Reward functions are loaded from users' files."""

from __future__ import annotations

import inspect
from pathlib import Path

import anyio
import pytest

from slipstream.errors import ConfigError
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.manager import NaiveRewardManager
from slipstream.rewards.prime import PrimeRewardManager
from slipstream.rewards.protocol import Score
from tests.rewards.helpers import decode, sample

CODE = """
from dataclasses import dataclass
from math import sqrt

@dataclass
class Helper:
    x: int = 2

def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    return {"score": scale * len(solution_str), "extra": Helper().x}

async def slow(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return kwargs["bonus"]

def compute_reward(answers, **kwargs):
    return 0

_private = compute_reward
value = 3
"""


def write(folder: Path, code: str = CODE, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(code)
    return path


def call(function: object, text: str) -> object:
    assert callable(function)
    return function(data_source="d", solution_str=text, ground_truth=None, extra_info={})


def test_functions_are_loaded_with_bound_keywords(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert call(get_custom_reward_fn(path), "abc") == {"score": 3.0, "extra": 2}
    scaled = get_custom_reward_fn(str(path), "compute_score", {"scale": 2.0})
    assert call(scaled, "abc") == {"score": 6.0, "extra": 2}
    slow = get_custom_reward_fn(path, "slow", {"bonus": 1})
    assert inspect.iscoroutinefunction(slow)


def test_files_with_equal_names_are_separate_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), f"def compute_score(**kwargs):\n return {number}")
    one, two = (get_custom_reward_fn(tmp_path / n / "mine.py") for n in ("1", "2"))
    assert (call(one, ""), call(two, "")) == (1, 2)


def test_missing_files_and_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path '.*no\.py' is not a file"):
        get_custom_reward_fn(tmp_path / "no.py")
    with pytest.raises(
        ConfigError,
        match=r"name 'compute_scor' is not in '.*mine\.py'; did you mean "
        r"compute_score or compute_reward\? It defines: Helper, compute_reward, compute_score, ",
    ):
        get_custom_reward_fn(path, "compute_scor")
    with pytest.raises(ConfigError, match=r"name 'value' is not in"):
        get_custom_reward_fn(path, "value")
    with pytest.raises(ConfigError, match=r"'.*empty\.py'\. It defines: no functions"):
        get_custom_reward_fn(write(tmp_path, "x = 1", "empty.py"))


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("def compute_score(:", "broken.py", "does not import: SyntaxError"),
        ("import no_such_module_xyz", "broken.py", "does not import: ModuleNotFoundError"),
        ("1 / 0", "broken.py", "does not import: ZeroDivisionError: division by zero"),
        ("x", "broken.txt", r"its name must end in \.py"),
    ],
)
def test_files_that_cannot_be_imported_are_refused(
    tmp_path: Path, code: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_custom_reward_fn(write(tmp_path, code, name))


def test_signatures_are_checked_when_loading(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"compute_reward\(answers, \*\*kwargs\) in .* cannot be called with",
    ):
        get_custom_reward_fn(path, "compute_reward")
    with pytest.raises(ConfigError, match=r"reward_kwargs scal: got an unexpected keyword"):
        get_custom_reward_fn(path, "compute_score", {"scal": 2.0})
    with pytest.raises(ConfigError, match="must not contain ground_truth"):
        get_custom_reward_fn(path, "compute_score", {"ground_truth": 2.0})


TRL = """
class Repetition:
    __name__ = "repetition_penalty_reward"
    def __init__(self, penalty):
        self.penalty = penalty
    def __call__(self, completion_ids, **kwargs):
        return [self.penalty * (len(ids) - len(set(ids))) for ids in completion_ids]

repetition = Repetition(-1.0)

def closure():
    def soft_overlong(completion_ids, **kwargs):
        return [-float(len(ids) > 2) for ids in completion_ids]
    return soft_overlong

overlong = closure()

async def state(prompts, trainer_state, log_metric, **columns):
    log_metric("step", trainer_state.global_step)
    return [1.0]

def logs(completions, log_metric, log_extra):
    log_metric("calls", 1)
    log_extra("text", completions)
    return [1.0]

def no_steps(completions, trainer_state): return [trainer_state.max_steps]

def environments(completions, environments, **columns): return [0.0]

def only_columns(answer, **columns): return [0.0]

def may(completions, environments=None, log_extra=None, **columns): return [0.0]
"""


def test_functions_of_trl_are_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, TRL)

    def score(name: str, manager: type[NaiveRewardManager] = NaiveRewardManager) -> Score:
        made = manager(get_custom_reward_fn(path, name), decode=decode, timeout_s=30.0)
        return anyio.run(made.score_sample, sample(4, 4, 4))

    assert score("repetition") == Score(-2.0)
    assert score("overlong") == Score(-1.0)
    assert score("state") == Score(1.0, {"step": 0.0})
    assert score("may") == Score(0.0)
    assert "set trainer.total_training_steps" in (score("no_steps").failure or "")
    logged = Score(1.0, {"calls": 1.0}, extras={"text": "4 4 4"})
    assert score("logs") == score("logs", PrimeRewardManager) == logged
    assert score("repetition", PrimeRewardManager) == Score(-2.0)
    assert score("overlong", PrimeRewardManager) == Score(-1.0)


def test_functions_that_trl_itself_would_call_otherwise_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, TRL)
    with pytest.raises(ConfigError, match=r"needs environments, .* give the parameter a default"):
        get_custom_reward_fn(path, "environments")
    with pytest.raises(ConfigError, match=r"one of the parameters completions, completion_ids, "):
        get_custom_reward_fn(path, "only_columns")
    with pytest.raises(ConfigError, match="must not contain completion_ids"):
        get_custom_reward_fn(path, "overlong", {"completion_ids": []})
    with pytest.raises(ConfigError, match="must not contain log_metric"):
        get_custom_reward_fn(path, "state", {"log_metric": print})


def test_data_proto_functions_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def mine(data, return_dict): return {'reward_tensor': [2.0]}\n")
    function = get_custom_reward_fn(path, "mine")
    manager = NaiveRewardManager(function, decode=decode)
    assert anyio.run(manager.score_sample, sample(1)).value == 2.0
