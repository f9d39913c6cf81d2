"""Every metric that a run logs: its name, unit and meaning, in one table.

The names are VERL's where VERL has one. Knows nothing of how a number is computed. Called by the
loggers (strict mode), by tests, by tools that compare runs, and, as `python -m
slipstream.metrics.names`, to print docs/metrics.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PLACEHOLDERS = {
    "source": r".+?",  # a data_source may hold slashes: "openai/gsm8k"
    "part": r".+?",
    "reason": r"[a-z_]+",
    "rule": r"[a-z_0-9]+",
    "plan": r"(?:off|\d+_\d+_\d+)",
    "N": r"[1-9]\d*",
    "k": r"[1-9]\d*",
}


def _compile(name: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\}|<[^>]*>)", name)
    out = []
    for part in parts:
        if part.startswith("{"):
            out.append("(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")")
        elif part.startswith("<"):
            out.append(_PLACEHOLDERS[part[1:-1]])
        else:
            out.append(re.escape(part))
    return re.compile("".join(out))


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    `name` may hold alternatives `{mean,max}` and placeholders `<source>`. `wall_time`: the value
    depends on the clock or the machine, so that two runs that compute the same differ in it.
    `headline`: its label on the console; rows without one are not printed there.
    """

    name: str
    unit: str
    meaning: str
    wall_time: bool = False
    headline: str = ""
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", _compile(self.name))


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of the table that belong together."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


SECTIONS: tuple[Section, ...] = (
    Section(
        "Policy update",
        "Averages over the mini-batches of one step. A token is one that carries loss.",
        (
            Metric("actor/pg_loss", "nats", "policy-gradient loss"),
            Metric(
                "actor/pg_clipfrac", "share", "tokens whose ratio was clipped from above or below"
            ),
            Metric("actor/pg_clipfrac_lower", "share", "tokens cut by the dual-clip bound"),
            Metric(
                "actor/ppo_kl", "nats", "mean of old minus new log-prob: how far the update went"
            ),
            Metric("actor/entropy", "nats", "mean entropy of the policy", headline="entropy"),
            Metric("actor/kl_loss", "nats", "KL estimate to the reference policy in the loss"),
            Metric("actor/kl_coef", "", "weight of that KL loss"),
            Metric("actor/reward_kl_penalty", "nats", "KL estimate to the reference in the reward"),
            Metric("actor/reward_kl_penalty_coeff", "", "weight of that KL penalty"),
            Metric("actor/grad_norm", "", "gradient norm before clipping", headline="grad_norm"),
            Metric("actor/lr", "", "learning rate"),
            Metric("actor/muon_lr", "", "learning rate of Muon's matrices"),
        ),
    ),
    Section(
        "Value update",
        "Where a critic is trained (`algorithm.adv_estimator=gae`). Averages over the mini-batches "
        "of one step.",
        (
            Metric("critic/vf_loss", "reward^2", "clipped value loss"),
            Metric("critic/vf_clipfrac", "share", "tokens whose clipped error is the larger"),
            Metric("critic/vpred_mean", "reward", "mean value under the weights being trained"),
            Metric(
                "critic/vf_explained_var",
                "share",
                "of the returns' variance, what the values before the update explain",
            ),
            Metric("critic/values/{mean,max,min}", "reward", "values before the update"),
            Metric("critic/grad_norm", "", "gradient norm before clipping"),
            Metric("critic/lr", "", "learning rate"),
            Metric("critic/muon_lr", "", "learning rate of Muon's matrices"),
            Metric("critic/skipped_steps", "updates", "skipped: loss or gradient not finite"),
        ),
    ),
    Section(
        "Scores",
        "Over samples; advantages and returns over tokens. Failed samples have no score. (The name "
        "critic is VERL's; no critic is needed.)",
        (
            Metric(
                "critic/score/mean", "reward", "what the reward function gave", headline="reward"
            ),
            Metric("critic/score/{max,min}", "reward", "largest and smallest score"),
            Metric(
                "critic/rewards/{mean,max,min}", "reward", "score after KL and length penalties"
            ),
            Metric("critic/advantages/{mean,max,min}", "", "advantages that weight the update"),
            Metric("critic/returns/{mean,max,min}", "reward", "returns"),
            Metric("reward/<part>/{mean,max,min}", "reward", "a named part of a composed reward"),
        ),
    ),
    Section(
        "Lengths and turns",
        "Response: everything after the prompt, tool replies included.",
        (
            Metric("response_length/mean", "tokens", "mean response", headline="length"),
            Metric("response_length/{max,min,median,p90}", "tokens", "spread of responses"),
            Metric("response_length/clip_ratio", "share", "responses of the maximal length"),
            Metric("response/aborted_ratio", "share", "samples stopped from outside"),
            Metric("prompt_length/{mean,max,min}", "tokens", "prompts"),
            Metric("prompt_length/clip_ratio", "share", "prompts of the maximal length"),
            Metric(
                "num_turns/{mean,max,min}", "turns", "prompt, assistant and tool turns together"
            ),
        ),
    ),
    Section(
        "Rollout",
        "How generation went.",
        (
            Metric("rollout/num_prompts", "prompts", "groups in the step"),
            Metric("rollout/num_samples", "samples", "samples in the step"),
            Metric(
                "rollout/longest_over_median",
                "ratio",
                "longest over median response of a group, mean over groups: the long tail",
            ),
            Metric(
                "rollout/tokens_per_second",
                "tokens/s",
                "generated tokens per second of generation",
                wall_time=True,
                headline="tok/s",
            ),
            Metric(
                "rollout/tail_seconds",
                "s",
                "of generation, while fewer than half as many responses were under way as there "
                "had been at once",
                wall_time=True,
            ),
            Metric(
                "rollout/idle_core_seconds",
                "s",
                "cores of this machine that the run left unused while it generated, times seconds",
                wall_time=True,
            ),
            Metric(
                "rollout/used_idle_core_seconds",
                "s",
                "of these, what a process beside the run computed in (opportunistic co-training)",
                wall_time=True,
            ),
            Metric("rollout/num_dropped_groups", "groups", "groups that a filter left out"),
            Metric("rollout/num_dropped_groups/<reason>", "groups", "the same by the reason"),
            Metric(
                "train/num_gen_batches",
                "batches",
                "what it took to fill one batch with groups that the filter keeps (VERL's name)",
            ),
            Metric(
                "rollout/num_carried_over",
                "samples",
                "unfinished samples that a later step goes on with",
            ),
            Metric(
                "rollout/staleness/{mean,max}",
                "versions",
                "how old the policy of a token was at its update",
            ),
        ),
    ),
    Section(
        "Rollout correction",
        "With `algorithm.rollout_correction`: the trainer's policy against the law of the rollout. "
        "rho is a token's log-ratio, trainer less rollout.",
        (
            Metric("rollout_corr/{kl,k3_kl}", "nats", "mean of -rho, and of e^rho - 1 - rho"),
            Metric("rollout_corr/{chi2_token,chi2_seq}", "", "chi-squared divergences"),
            Metric("rollout_corr/{training_ppl,rollout_ppl}", "", "perplexities of responses"),
            Metric("rollout_corr/{training_log_ppl,rollout_log_ppl}", "nats", "their logarithms"),
            Metric(
                "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}",
                "nats",
                "training less rollout",
            ),
            Metric("rollout_corr/ppl_ratio", "", "mean of e^ of that difference"),
            Metric(
                "rollout_corr/rollout_is_{mean,std,min,max,eff_sample_size}",
                "",
                "importance weights: before truncation, but std and eff_sample_size of those used",
            ),
            Metric(
                "rollout_corr/rollout_is_ratio_fraction_{high,low}",
                "share",
                "weights beyond a bound",
            ),
            Metric(
                "rollout_corr/rollout_is_seq_{mean,std,min,max,max_deviation}",
                "",
                "means of the weights over responses",
            ),
            Metric(
                "rollout_corr/rollout_is_seq_fraction_{high,low}",
                "share",
                "such means beyond a bound",
            ),
            Metric(
                "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
                "share",
                "tokens rejected, and responses with a rejected token",
            ),
            Metric(
                "rollout_corr/rollout_rs_<rule>_{masked_fraction,seq_masked_fraction}",
                "share",
                "the same of one rule",
            ),
            Metric("rollout_corr/rollout_rs_<rule>_{mean,min,max}", "", "statistic of that rule"),
            Metric(
                "rollout_corr/outside_support",
                "tokens",
                "sampled tokens that the trainer's replay of the sampler would not have kept",
            ),
            Metric("rollout_corr/rollout_is_veto_fraction", "share", "responses vetoed"),
            Metric(
                "rollout_corr/rollout_is_catastrophic_token_fraction",
                "share",
                "tokens that caused it",
            ),
        ),
    ),
    Section(
        "Run",
        "Where the run stands, and how well rollout and trainer agree.",
        (
            Metric("training/global_step", "steps", "finished steps"),
            Metric("training/epoch", "epochs", "passes over the prompts"),
            Metric("training/policy_version", "versions", "published weight updates"),
            Metric(
                "training/num_zero_variance_groups",
                "groups",
                "groups of two or more samples with one and the same score: they teach nothing",
            ),
            Metric(
                "training/num_failed_rewards",
                "samples",
                "samples whose engine, tool or reward failed",
            ),
            Metric("training/num_failed_rewards/<reason>", "samples", "the same by the reason"),
            Metric(
                "training/num_lone_samples",
                "samples",
                "samples left out since all others of their group failed: nothing to compare with",
            ),
            Metric(
                "training/skipped_batch",
                "0 or 1",
                "1 where no sample could be trained on, and the update was left out",
            ),
            Metric(
                "training/skipped_steps",
                "steps",
                "optimizer steps left out since the gradient was not finite",
            ),
            Metric(
                "training/rollout_probs_diff_{max,mean}",
                "probability",
                "difference of a sampled token's probability in rollout and trainer; this and the "
                "next two of the batch's first optimizer step",
            ),
            Metric(
                "training/rollout_log_probs_bitwise_equal",
                "share",
                "sampled tokens whose log-prob is the same number in rollout and trainer",
            ),
            Metric(
                "training/rollout_log_probs_differing",
                "tokens",
                "sampled tokens whose log-prob is another number in the trainer; 0 in exact mode",
            ),
        ),
    ),
    Section(
        "Validation",
        "`<source>` is the data source; N responses per prompt. A failed sample counts as wrong.",
        (
            Metric(
                "val-core/<source>/acc/mean@<N>", "share", "right responses", headline="accuracy"
            ),
            Metric(
                "val-aux/<source>/acc/mean@<N>/{ci_low,ci_high}",
                "share",
                "95 % Wilson interval of it; a prompt counts as one trial",
            ),
            Metric(
                "val-aux/<source>/acc/std@<N>", "share", "deviation over N responses, by prompt"
            ),
            Metric(
                "val-aux/<source>/acc/pass@<k>",
                "share",
                "chance of a right one among k of the N responses (exact: without replacement)",
            ),
            Metric(
                "val-core/<source>/acc/best@<N>/mean",
                "share",
                "the same of N by VERL's resampling: 1,000 draws with replacement, seed 42",
            ),
            Metric(
                "val-core/<source>/acc/maj@<N>/mean",
                "share",
                "accuracy of the most frequent of N answers, where functions tell `pred`",
            ),
            Metric(
                "val-aux/<source>/acc/{best,worst,maj}@<k>/{mean,std}",
                "share",
                "best, worst and majority of k, likewise: mean and deviation over the draws",
            ),
            Metric("val-aux/<source>/num_prompts", "prompts", "prompts evaluated"),
            Metric("val-aux/<source>/num_failed", "samples", "responses that failed"),
            Metric("val-aux/<source>/response_length/{mean,max}", "tokens", "their lengths"),
            Metric(
                "val-aux/<source>/response_length/clip_ratio",
                "share",
                "responses of the maximal length",
            ),
        ),
    ),
    Section(
        "Supervised fine-tuning",
        "Averages over one step.",
        (
            Metric("sft/loss", "nats", "cross-entropy per target token", headline="loss"),
            Metric("sft/entropy", "nats", "mean entropy of the model"),
            Metric("sft/lr", "", "learning rate"),
            Metric("sft/muon_lr", "", "learning rate of Muon's matrices"),
            Metric("sft/grad_norm", "", "gradient norm before clipping", headline="grad_norm"),
            Metric("sft/tokens", "tokens", "target tokens of the step"),
            Metric(
                "sft/tokens_per_second",
                "tokens/s",
                "all tokens per second",
                wall_time=True,
                headline="tok/s",
            ),
        ),
    ),
    Section(
        "Speculation",
        "Decode steps of the rollout engine; with `speculative.enable` only.",
        (
            Metric(
                "spec/accept_length",
                "tokens",
                "tokens per verification of drafts, the policy's own next one included",
                wall_time=True,
                headline="accept",
            ),
            Metric(
                "spec/on_fraction",
                "share",
                "share of decoding time in steps that draft",
                wall_time=True,
            ),
            Metric(
                "spec/head_fraction",
                "share",
                "share of the drafted tokens that the draft head made, and not history",
                wall_time=True,
            ),
            Metric(
                "spec/recess_fraction",
                "share",
                "share of decode steps in rollouts that nobody drafts for, since drafts had gained "
                "nothing",
                wall_time=True,
            ),
            Metric(
                "spec/plan", "tokens", "drafts in a row, mean over steps that draft", wall_time=True
            ),
            Metric(
                "spec/acceptance_rate_<k>",
                "share",
                "of the verifications whose drafts were k deep or more, those that accepted k; the "
                "sixteenth has all that is deeper",
                wall_time=True,
            ),
            Metric(
                "spec/plan_seconds/{bs_1,bs_4,bs_16,bs_64,bs_more}/<plan>",
                "s",
                "decode steps by running requests and by draft plan (depth_topk_verified, or off)",
                wall_time=True,
            ),
            Metric(
                "spec/tokens_per_second/{bs_1,bs_4,bs_16,bs_64,bs_more}",
                "tokens/s",
                "tokens per second of decode steps with at most so many running requests (and more "
                "than in the class before)",
                wall_time=True,
            ),
        ),
    ),
    Section(
        "Draft head",
        "Losses and accuracy are averages over the tokens of one step that can be drafted; "
        "acceptance is of held-out responses, with their own noise.",
        (
            Metric("draft/loss", "", "weighted sum of the losses below", headline="loss"),
            Metric("draft/value_loss", "", "smooth L1 between predicted and true features"),
            Metric("draft/soft_loss", "nats", "cross-entropy to the policy's distribution"),
            Metric(
                "draft/acceptance_loss",
                "nats",
                "-log of the probability that a draft sampled from the head is accepted; only with "
                "`acceptance_weight` above 0",
            ),
            Metric(
                "draft/topk_mass_loss",
                "nats",
                "-log of the policy's mass on the head's best tokens; only with `topk_mass_weight` "
                "above 0",
            ),
            Metric(
                "draft/accuracy",
                "share",
                "first drafts whose likeliest token is the policy's",
                headline="accuracy",
            ),
            Metric("draft/slots", "tokens", "tokens of the step that can be drafted"),
            Metric("draft/lr", "", "learning rate"),
            Metric("draft/muon_lr", "", "learning rate of Muon's matrices"),
            Metric("draft/grad_norm", "", "gradient norm before clipping"),
            Metric(
                "draft/tokens_per_second",
                "tokens/s",
                "all tokens per second of training steps",
                wall_time=True,
                headline="tok/s",
            ),
            Metric(
                "draft/accept_depth_<k>",
                "share",
                "chains of drafts, one after each token, whose first k are the policy's own",
            ),
            Metric(
                "draft/accept_length_<k>",
                "tokens",
                "tokens that a verification of k drafts gives, the policy's own included",
            ),
        ),
    ),
    Section(
        "Draft head that learns while the policy does",
        "After each step; losses and acceptance after steps with a slice of training only. "
        "`before` is of the head in use, `after` of the trained one, both on held-out responses "
        "with their own noise. With `speculative.train.mode=opportunistic` all of them depend on "
        "time.",
        (
            Metric("drafter/loss", "", "weighted sum of the losses below, mean over the slice"),
            Metric("drafter/feature_loss", "", "smooth L1 between predicted and true features"),
            Metric("drafter/token_loss", "nats", "cross-entropy to the policy's distribution"),
            Metric(
                "drafter/acceptance_loss",
                "nats",
                "-log of the probability that a draft sampled from the head is accepted; only with "
                "`acceptance_weight` above 0",
            ),
            Metric(
                "drafter/topk_mass_loss",
                "nats",
                "-log of the policy's mass on the head's best tokens; only with `topk_mass_weight` "
                "above 0",
            ),
            Metric("drafter/updates", "steps", "optimizer steps so far"),
            Metric("drafter/tokens_seen", "tokens", "tokens trained on so far"),
            Metric("drafter/seconds", "s", "what the slice took", wall_time=True),
            Metric("drafter/version", "", "version of the head in use"),
            Metric("drafter/publishes", "heads", "trained heads that went to the engines so far"),
            Metric(
                "drafter/publishes_in_rollouts",
                "heads",
                "of these, those that came from a process beside the run while responses were "
                "generated, and were drafted with at once",
                wall_time=True,
            ),
            Metric(
                "drafter/staleness_versions",
                "versions",
                "policy versions between the newest responses that the head in use has learned "
                "from and the policy that decodes from now on; left out before it has learned",
            ),
            Metric(
                "drafter/decoded_samples",
                "samples",
                "responses of the step whose features came from the engine's decoding",
            ),
            Metric(
                "drafter/hold_backs",
                "heads",
                "trained heads that accepted less than the one in use, by more than chance, or "
                "could not be measured",
            ),
            Metric("drafter/restarts", "processes", "that trained the head, ended and began anew"),
            Metric(
                "drafter/cpu_seconds",
                "s",
                "processor time of slices so far, of a process beside the run",
                wall_time=True,
            ),
            Metric("drafter/failed_slices", "slices", "ended by a loss that was not finite"),
            Metric("drafter/buffer_bytes", "bytes", "features of collected responses"),
            Metric("drafter/buffer_samples", "samples", "collected responses"),
            Metric("drafter/evicted_samples", "samples", "given up so far since there was no room"),
            Metric("drafter/acceptance_rate", "share", "drafts of the trained head that are right"),
            Metric(
                "drafter/acceptance_rate/{before,after}", "share", "drafts that are right, of all"
            ),
            Metric(
                "drafter/accept_length/{before,after}",
                "tokens",
                "tokens that a verification gives, the policy's own included",
            ),
            Metric(
                "drafter/acceptance_rate_<k>/{before,after}",
                "share",
                "chains of drafts, one after each token, whose first k are the policy's own",
            ),
        ),
    ),
    Section(
        "Time and machine",
        "Wall time: these differ between runs that compute the same.",
        (
            Metric(
                "timing_s/{gen,reward,adv,old_log_prob,ref,values,update_critic,update_actor,sync,drafter}",
                "s",
                "one stage of the step: generation, the wait for rewards when all responses had "
                "ended, advantages, log-probs of the policy and of the reference, update, weights "
                "to the engines, training of the draft head; no two overlap",
                wall_time=True,
            ),
            Metric(
                "timing_s/gen/{prefill,decode,draft,verify,wait}",
                "s",
                "what the engine did in gen: contexts, steps without drafts, making drafts, "
                "checking them, nothing; they add up to it",
                wall_time=True,
            ),
            Metric(
                "timing_s/other",
                "s",
                "rest of the step: the stages and it add up to timing_s/step",
                wall_time=True,
            ),
            Metric(
                "timing_s/{testing,dump_rollout_generations}",
                "s",
                "duration of what comes after the step, and is no part of it",
                wall_time=True,
            ),
            Metric(
                "timing_s/save_checkpoint",
                "s",
                "how long the last save, after the step before, kept the run waiting; no part of a "
                "step: a step is logged before it is saved",
                wall_time=True,
            ),
            Metric(
                "timing_s/step",
                "s",
                "duration of a step: rollout, update, weights to the engines, draft head",
                wall_time=True,
                headline="s/step",
            ),
            Metric(
                "timing_per_token_ms/{gen,update_actor}",
                "ms",
                "stage per token: gen per response token, update_actor per token of the batch",
                wall_time=True,
            ),
            Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
            Metric("perf/time_per_step", "s", "the same as timing_s/step", wall_time=True),
            Metric(
                "perf/throughput", "tokens/s", "total_num_tokens / time_per_step", wall_time=True
            ),
            Metric("perf/cpu_memory_used_gb", "GB", "memory used by the machine", wall_time=True),
        ),
    ),
)

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS for metric in section.metrics)


def find(name: str) -> Metric | None:
    """The row that `name` belongs to, None where there is none."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ValueError for names that no row of the table allows."""
    unknown = [name for name in metrics if find(name) is None]
    if not unknown:
        return
    known = [metric.name for metric in METRICS]
    near = difflib.get_close_matches(unknown[0], known, n=2, cutoff=0.5)
    hint = f" (near {unknown[0]}: {', '.join(near)})" if near else ""
    raise ValueError(
        f"unknown metric names: {', '.join(unknown)}{hint}; use a name of docs/metrics.md or add a "
        "row to slipstream/metrics/names.py"
    )


def deterministic(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `metrics` that equal runs must agree on, bit for bit.

    Leaves out what depends on wall time or on the machine's load. Unknown names stay: dropping them
    could hide a difference.
    """
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        metric = find(name)
        if metric is None or not metric.wall_time:
            kept[name] = value
    return kept


def markdown() -> str:
    """The table as docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Printed by `python -m slipstream.metrics.names`; edit the table in names.py. -->",
        "",
        "Every number that a run logs, one line of `metrics.jsonl` a step:",
        '`{"step": 12, "data": {"critic/score/mean": 0.41, ...}}`. `{mean,max}` stands for',
        "one metric each, `<source>` for a name of yours. Metrics marked with *t* depend on wall",
        "time; all others are equal, bit for bit, in two runs of one configuration, seed and",
        "thread count.",
        "A statistic of nothing (the mean score of a step whose samples all failed) is left out.",
        'An infinity or a NaN is written as `"Infinity"`, `"-Infinity"` or `"NaN"`.',
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", section.about, ""]
        lines += ["| name | unit | meaning | |", "|---|---|---|---|"]
        for metric in section.metrics:
            mark = "*t*" if metric.wall_time else ""
            lines.append(f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {mark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
