"""`slipstream.compat.verl` has verl's module layout and its signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

# Import lines of reward files, data sets, losses and preprocessing scripts for verl.
LINES = """
from verl import DataProto
from verl.protocol import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config import AlgoConfig
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss, register_adv_est
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, kl_penalty
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.reward import compute_reward, get_custom_reward_fn, load_reward_manager
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.fs import copy_to_local
from verl.utils.hdfs_io import copy, makedirs
from verl.utils.import_utils import load_extern_object, load_extern_type
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import append_to_dict, union_two_dict
from verl.utils.ray_utils import get_event_loop
from verl.utils import torch_functional as verl_F
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits, masked_mean
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator, DynamicGenDataset
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.workers.config import ActorConfig
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls, register
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import register
from verl.utils.reward_score import _default_compute_score, default_compute_score
from verl.utils.reward_score import geo3k, gsm8k, math_dapo, math_verify, prime_code, prime_math
from verl.utils.reward_score import sandbox_fusion, search_r1_like_qa_em
from verl.utils.reward_score.gsm8k import compute_score, extract_solution
from verl.utils.reward_score.math import compute_score, is_equiv, strip_string
from verl.utils.reward_score.math_batch import compute_score_batched
from verl.utils.reward_score.math_dapo import is_correct_minerva, is_correct_strict_box, verify
from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.math_verify import compute_score
from verl.utils.reward_score.prime_code import compute_score
from verl.utils.reward_score.prime_math import grade_answer, match_answer, math_equal
from verl.utils.reward_score.prime_math.grader import math_equal
from verl.utils.reward_score.sandbox_fusion import compute_score
""".strip().split("\n")


@pytest.mark.parametrize("line", LINES)
def test_an_import_of_verl_works_after_replacing_the_packages_name(line: str) -> None:
    names: dict[str, Any] = {}
    exec(line.replace("from verl", "from slipstream.compat.verl", 1), names)
    imported = line.split(" import ", 1)[1].split(" as ")[-1].split(", ")
    assert all(names[name] is not None for name in imported)


def test_modules_export_the_names_of_the_package() -> None:
    package = importlib.import_module("slipstream.compat.verl")
    for module in (
        "protocol",
        "trainer.ppo.ray_trainer",
        "trainer.ppo.reward",
        "trainer.main_ppo",
        "utils.dataset.rl_dataset",
        "workers.reward_manager",
    ):
        found = importlib.import_module(f"slipstream.compat.verl.{module}")
        shared = set(found.__all__) & set(package.__all__)
        if module == "protocol":
            shared.remove("collate_fn")  # two functions of verl have this name
        assert shared
        assert all(getattr(found, name) is getattr(package, name) for name in shared)


# Parameters in verl's order, over 0.6.1, 0.7.0 and main; `=` marks those with a default. A name
# after `|` exists in some versions only, so it must be accepted by name.
GROUP = "token_level_rewards response_mask index epsilon="
SCORES = "token_level_rewards response_mask index"
LOSS = "old_log_prob log_prob advantages response_mask loss_agg_mode= config= | rollout_is_weights="
SCORE = "solution_str ground_truth method= format_score= score="
SIGNATURES = {
    "RayPPOTrainer": "config tokenizer role_worker_mapping resource_pool_manager "
    "ray_worker_group_cls= processor= | reward_fn= val_reward_fn= train_dataset= val_dataset= "
    "collate_fn= train_sampler= device_name=",
    "create_rl_dataset": "data_paths data_config tokenizer processor is_train= max_samples=",
    "create_rl_sampler": "data_config dataset",
    "RLHFDataset": "data_files tokenizer config processor= max_samples=",
    "MultiTurnSFTDataset": "parquet_files tokenizer config= | processor= max_samples=",
    "collate_fn": "data_list",
    "load_reward_manager": "config tokenizer | num_examine",
    "get_custom_reward_fn": "config",
    "compute_reward": "data reward_fn",
    "compute_reward_async": "data config= tokenizer= | reward_fn=",
    "default_compute_score": "data_source solution_str ground_truth extra_info= "
    "sandbox_fusion_url= concurrent_semaphore= memory_limit_mb= | method=",
    "compute_advantage": "data adv_estimator gamma= lam= num_repeat= norm_adv_by_std_in_grpo= "
    "config=",
    "NaiveRewardManager": "tokenizer num_examine compute_score= reward_fn_key=",
    "BatchRewardManager": "tokenizer num_examine compute_score reward_fn_key= | max_batch=",
    "DAPORewardManager": "tokenizer num_examine compute_score= reward_fn_key= | max_resp_len= "
    "overlong_buffer_cfg=",
    "PrimeRewardManager": "tokenizer num_examine compute_score= reward_fn_key=",
    "register_adv_est": "name_or_enum",
    "get_adv_estimator_fn": "name_or_enum",
    "register_policy_loss": "name",
    "get_policy_loss_fn": "name",
    "protocol.pad_dataproto_to_divisor": "data size_divisor",
    "protocol.unpad_dataproto": "data pad_size",
    "protocol.union_tensor_dict": "tensor_dict1 tensor_dict2",
    "protocol.union_numpy_dict": "tensor_dict1 tensor_dict2",
    "protocol.fold_batch_dim": "data new_batch_size",
    "protocol.unfold_batch_dim": "data batch_dims=",
    "protocol.collate_fn": "x",
    "protocol.list_of_dict_to_dict_of_list": "list_of_dict",
    "protocol.DataProto": "batch= non_tensor_batch= meta_info=",
    "protocol.DataProtoItem": "batch= non_tensor_batch= meta_info=",
    "protocol.DataProto.from_single_dict": "data meta_info= auto_padding=",
    "protocol.DataProto.from_dict": "tensors= non_tensors= meta_info= num_batch_dims= "
    "auto_padding=",
    "protocol.DataProto.from_tensordict": "tensor_dict meta_info= num_batch_dims=",
    "protocol.DataProto.to_tensordict": "",
    "protocol.DataProto.concat": "data",
    "protocol.DataProto.union": "other",
    "protocol.DataProto.select": "batch_keys= non_tensor_batch_keys= meta_info_keys= deepcopy=",
    "protocol.DataProto.select_idxs": "idxs",
    "protocol.DataProto.slice": "start= end= step=",
    "protocol.DataProto.pop": "batch_keys= non_tensor_batch_keys= meta_info_keys=",
    "protocol.DataProto.rename": "old_keys new_keys",
    "protocol.DataProto.reorder": "indices",
    "protocol.DataProto.make_iterator": "mini_batch_size epochs seed= dataloader_kwargs=",
    "protocol.DataProto.is_padding_enabled": "",
    "protocol.DataProto.padding": "padding_size padding_candidate=",
    "protocol.DataProto.chunk": "chunks",
    "protocol.DataProto.split": "split_size",
    "protocol.DataProto.repeat": "repeat_times= interleave=",
    "protocol.DataProto.sample_level_repeat": "repeat_times",
    "protocol.DataProto.unfold_column_chunks": "n_split split_keys=",
    "protocol.DataProto.to": "device",
    "protocol.DataProto.save_to_disk": "filepath",
    "protocol.DataProto.load_from_disk": "filepath",
    "protocol.DataProto.check_consistency": "",
    "protocol.DataProto.get_data_info": "",
    "protocol.DataProto.print_size": "prefix=",
    "protocol.DataProto.print_summary": "desc",
    "trainer.ppo.ray_trainer.apply_kl_penalty": "data kl_ctrl kl_penalty=",
    "trainer.ppo.ray_trainer.compute_response_mask": "data",
    "trainer.ppo.core_algos.agg_loss": "loss_mat loss_mask loss_agg_mode | dp_size= "
    "batch_num_tokens= global_batch_size= loss_scale_factor=",
    "trainer.ppo.core_algos.compute_value_loss": "vpreds returns values response_mask "
    "cliprange_value loss_agg_mode= | dp_size= batch_num_tokens= global_batch_size= "
    "loss_scale_factor=",
    "trainer.ppo.core_algos.compute_policy_loss": "old_log_prob log_prob advantages "
    "response_mask cliprange= cliprange_low= cliprange_high= clip_ratio_c= loss_agg_mode=",
    "trainer.ppo.core_algos.compute_entropy_loss": "logits response_mask loss_agg_mode=",
    "trainer.ppo.core_algos.compute_rewards": "token_level_scores old_log_prob ref_log_prob "
    "kl_ratio",
    "trainer.ppo.core_algos.kl_penalty": "logprob ref_logprob kl_penalty",
    "trainer.ppo.core_algos.kl_penalty_forward": "logprob ref_logprob kl_penalty",
    "trainer.ppo.core_algos.get_kl_controller": "kl_ctrl",
    "trainer.ppo.core_algos.AdaptiveKLController": "init_kl_coef target_kl horizon",
    "trainer.ppo.core_algos.FixedKLController": "kl_coef",
    "trainer.ppo.core_algos.compute_pf_ppo_reweight_data": "data reweight_method= weight_pow=",
    "trainer.ppo.core_algos.compute_gae_advantage_return": "token_level_rewards values "
    "response_mask gamma lam",
    "trainer.ppo.core_algos.compute_grpo_outcome_advantage": f"{GROUP} "
    "norm_adv_by_std_in_grpo= config=",
    "trainer.ppo.core_algos.compute_grpo_vectorized_outcome_advantage": f"{GROUP} "
    "norm_adv_by_std_in_grpo= config=",
    "trainer.ppo.core_algos.compute_grpo_passk_outcome_advantage": f"{GROUP} "
    "norm_adv_by_std_in_grpo= config=",
    "trainer.ppo.core_algos.compute_gdpo_outcome_advantage": f"{GROUP} "
    "norm_adv_by_std_in_grpo= config= | non_tensor_batch= batch=",
    "trainer.ppo.core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage": f"{GROUP} "
    "config=",
    "trainer.ppo.core_algos.compute_rloo_outcome_advantage": f"{GROUP} config=",
    "trainer.ppo.core_algos.compute_rloo_vectorized_outcome_advantage": f"{GROUP} config=",
    "trainer.ppo.core_algos.compute_opo_outcome_advantage": f"{GROUP} config=",
    "trainer.ppo.core_algos.compute_gpg_outcome_advantage": f"{GROUP} f_norm= alpha= config=",
    "trainer.ppo.core_algos.compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards "
    "response_mask config=",
    "trainer.ppo.core_algos.compute_remax_outcome_advantage": "token_level_rewards "
    "reward_baselines response_mask config=",
    "trainer.ppo.core_algos.compute_optimal_token_baseline_advantage": f"{SCORES} "
    "old_log_probs sum_pi_squared rollout_is_weights=",
    "trainer.ppo.core_algos.compute_multi_turn_optimal_token_baseline_advantage": f"{SCORES} "
    "old_log_probs sum_pi_squared rollout_is_weights=",
    **{
        f"trainer.ppo.core_algos.compute_policy_loss_{mode}": LOSS
        for mode in [
            "vanilla",
            "gspo",
            "sapo",
            "gpg",
            "clip_cov",
            "kl_cov",
            "geo_mean",
            "cispo",
            "dppo_tv",
            "dppo_kl",
            "bypass_mode",
        ]
    },
    "utils.tokenizer.hf_tokenizer": "name_or_path correct_pad_token= correct_gemma2= | "
    "trust_remote_code=",
    "utils.tokenizer.hf_processor": "name_or_path",
    "utils.tokenizer.set_pad_token_id": "tokenizer",
    "utils.fs.copy_to_local": "src cache_dir= | filelock= verbose= always_recopy= use_shm=",
    "utils.hdfs_io.makedirs": "name",
    "utils.hdfs_io.copy": "src dst",
    "utils.hdfs_io.exists": "path",
    "utils.import_utils.load_extern_object": "module_path object_name",
    "utils.import_utils.load_extern_type": "file_path type_name",
    "utils.model.compute_position_id_with_mask": "mask",
    "utils.py_functional.union_two_dict": "dict1 dict2",
    "utils.py_functional.append_to_dict": "data new_data | prefix=",
    "utils.torch_functional.masked_sum": "values mask axis=",
    "utils.torch_functional.masked_mean": "values mask axis=",
    "utils.torch_functional.masked_var": "values mask unbiased=",
    "utils.torch_functional.masked_whiten": "values mask shift_mean=",
    "utils.torch_functional.clip_by_value": "x tensor_min tensor_max",
    "utils.torch_functional.gather_from_labels": "data label",
    "utils.torch_functional.logprobs_from_logits": "logits labels inplace_backward=",
    "utils.torch_functional.logprobs_from_logits_naive": "logits labels",
    "utils.torch_functional.log_probs_from_logits_response": "input_ids logits response_length",
    "utils.torch_functional.entropy_from_logits": "logits",
    "utils.torch_functional.entropy_from_logits_with_chunking": "logits chunk_size=",
    "utils.torch_functional.calculate_sum_pi_squared_from_logits": "logits",
    "utils.torch_functional.get_response_mask": "response_id eos_token= dtype=",
    "utils.torch_functional.pad_2d_list_to_length": "response pad_token_id max_length=",
    "utils.torch_functional.pad_sequence_to_length": "tensors max_seq_len pad_token_id left_pad=",
    "utils.torch_functional.postprocess_data": "input_ids attention_mask max_length pad_token_id "
    "left_pad= truncation=",
    "utils.torch_functional.tokenize_and_postprocess_data": "prompt tokenizer max_length "
    "pad_token_id left_pad= truncation=",
    "utils.torch_functional.remove_pad_token": "input_ids attention_mask",
    "experimental.dataset.sampler.AbstractSampler": "data_source data_config",
    "experimental.reward_loop.reward_manager.base.RewardManagerBase": "config tokenizer "
    "compute_score",
    "workers.reward_manager.abstract.AbstractRewardManager": "tokenizer num_examine "
    "compute_score reward_fn_key=",
    "workers.reward_manager.register": "name",
    "workers.reward_manager.get_reward_manager_cls": "name",
    "utils.reward_score.get_default_compute_score": "reward_name",
    "utils.reward_score.gsm8k.extract_solution": "solution_str method=",
    "utils.reward_score.gsm8k.compute_score": SCORE,
    "utils.reward_score.math_reward.compute_score": "solution_str ground_truth",
    "utils.reward_score.math_reward.is_equiv": "str1 str2 verbose=",
    "utils.reward_score.math_reward.remove_boxed": "s",
    "utils.reward_score.math_reward.last_boxed_only_string": "string",
    "utils.reward_score.math_reward.strip_string": "string",
    "utils.reward_score.math_batch.compute_score_batched": "data_sources solution_strs "
    "ground_truths extra_infos",
    "utils.reward_score.math_dapo.last_boxed_only_string": "string",
    "utils.reward_score.math_dapo.remove_boxed": "s",
    "utils.reward_score.math_dapo.normalize_final_answer": "final_answer",
    "utils.reward_score.math_dapo.is_correct_minerva": "solution_str gt gt_need_extract= "
    "answer_pattern=",
    "utils.reward_score.math_dapo.is_correct_strict_box": "pred gt pause_tokens_index=",
    "utils.reward_score.math_dapo.verify": "solution_str answer strict_box_verify= "
    "pause_tokens_index=",
    "utils.reward_score.math_dapo.compute_score": "solution_str ground_truth strict_box_verify= "
    "pause_tokens_index=",
    "utils.reward_score.math_verify.compute_score": "model_output ground_truth timeout_score= | "
    "timeout=",
    "utils.reward_score.geo3k.format_reward": "predict_str",
    "utils.reward_score.geo3k.acc_reward": "predict_str ground_truth use_boxed=",
    "utils.reward_score.geo3k.compute_score": "predict_str ground_truth use_boxed= format_score=",
    "utils.reward_score.prime_math.compute_score": "model_output ground_truth",
    "utils.reward_score.prime_math.grade_answer": "given_answer ground_truth",
    "utils.reward_score.prime_math.match_answer": "response",
    "utils.reward_score.prime_math.remove_boxed": "s",
    "utils.reward_score.prime_math.math_equal": "prediction reference include_percentage= "
    "tolerance= timeout= pi=",
    "utils.reward_score.prime_code.compute_score": "completion test_cases continuous=",
    "utils.reward_score.sandbox_fusion.compute_score": "sandbox_fusion_url concurrent_semaphore "
    "memory_limit_mb completion test_cases continuous= timeout=",
    "utils.reward_score.search_r1_like_qa_em.compute_score": SCORE,
    "utils.reward_score.search_r1_like_qa_em.compute_score_subem": SCORE,
    "utils.reward_score.search_r1_like_qa_em.em_check": "prediction golden_answers",
    "utils.reward_score.search_r1_like_qa_em.subem_check": "prediction golden_answers",
    "utils.reward_score.search_r1_like_qa_em.extract_solution": "solution_str",
    "utils.reward_score.search_r1_like_qa_em.count_answer_tags": "text",
    "utils.reward_score.search_r1_like_qa_em.normalize_answer": "s",
}


def find(dotted: str) -> Any:
    """Return the object with this name below the package."""
    module, found = "slipstream.compat.verl", None
    for number, part in enumerate(parts := dotted.split(".")):
        try:
            found = importlib.import_module(f"{module}.{part}")
            module = found.__name__
        except ImportError:
            found = importlib.import_module(module) if number == 0 or found is None else found
            for name in parts[number:]:
                found = getattr(found, name)
            return found
    return found


@pytest.mark.parametrize("dotted", SIGNATURES)
def test_signatures_accept_what_verl_accepts(dotted: str) -> None:
    function = find(dotted)
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    named = {n: p for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    common, _, some = SIGNATURES[dotted].partition(" | ")
    ordered = [name.rstrip("=") for name in common.split()]
    assert list(named)[: len(ordered)] == ordered
    assert takes_all or {name.rstrip("=") for name in some.split()} <= set(parameters)
    needed = {name for name in [*common.split(), *some.split()] if not name.endswith("=")}
    ours = {n for n, p in parameters.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL}
    ours |= {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    assert ours <= needed


OWN = {"is_non_local", "local_path"}
CLASSES = {
    "AbstractCurriculumSampler",
    "AbstractRewardManager",
    "AdvantageEstimator",
    "DataProtoConfig",
    "PolicyLossFn",
}


@pytest.mark.parametrize(
    "module", sorted({name.rpartition(".")[0] for name in SIGNATURES if "." in name})
)
def test_the_table_has_every_function_of_a_module(module: str) -> None:
    found = find(module)
    exported = set(getattr(found, "__all__", ())) - OWN - CLASSES
    # A name of the package itself is in the table once, without the module.
    assert {name for name in exported if not {f"{module}.{name}", name} & set(SIGNATURES)} == set()


def test_the_guides_table_of_modules_is_true() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "from_verl.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in guide.split("## Modules")[1].split("\n") if "| `" in line]
    assert len(rows) > 8
    for first, content, *_ in rows:
        names = re.findall(r"`([\w.]+)`", first)
        # `.fs` behind `verl.utils.tokenizer` is `verl.utils.fs`.
        parent = names[0].rpartition(".")[0]
        modules = [find((parent + n if n.startswith(".") else n)[len("verl.") :]) for n in names]
        found = [name for name in re.findall(r"`(\w+)`", content) if name != "math"]
        assert found
        for name in found:
            assert any(hasattr(m, name) or _has_module(m, name) for m in modules), name


def _has_module(package: Any, name: str) -> bool:
    path = f"{package.__name__}.{name}"
    return hasattr(package, "__path__") and importlib.util.find_spec(path) is not None
