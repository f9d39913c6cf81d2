"""Every metric that a run logs: name, unit and meaning, in one table.

A metric that VERL also has keeps VERL's name. This module does not compute metrics. Loggers (in
strict mode), tests and tools that compare runs use the table. `python -m slipstream.metrics.names`
prints docs/metrics.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PLACEHOLDERS = {
    "source": r".+?",  # a data_source may contain slashes, as "openai/gsm8k" does
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

    `name` may contain alternatives such as `{mean,max}` and placeholders such as `<source>`.
    `wall_time` is True if the value depends on the clock or the machine, so that two runs that
    compute the same differ in it. `headline` is the label on the console, which does not print
    rows without one. `pattern` matches the names that the row describes.
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
    """A section of docs/metrics.md: rows that belong together."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


SECTIONS: tuple[Section, ...] = (
    Section(
        "Policy update",
        "Averages over the mini-batches of one step. A token here is a token with loss.",
        (
            Metric("actor/pg_loss", "nats", "policy loss"),
            Metric("actor/pg_clipfrac", "share", "tokens whose ratio was clipped at either bound"),
            Metric("actor/pg_clipfrac_lower", "share", "tokens clipped by the dual-clip bound"),
            Metric(
                "actor/ppo_kl",
                "nats",
                "mean of old minus new log-prob: how far the update moved the policy",
            ),
            Metric("actor/entropy", "nats", "mean entropy of the policy", headline="entropy"),
            Metric("actor/kl_loss", "nats", "estimated KL to the reference policy in the loss"),
            Metric("actor/kl_coef", "", "weight of that KL in the loss"),
            Metric(
                "actor/reward_kl_penalty",
                "nats",
                "estimated KL to the reference policy in the reward",
            ),
            Metric("actor/reward_kl_penalty_coeff", "", "weight of that KL in the reward"),
            Metric("actor/grad_norm", "", "gradient norm before clipping", headline="grad_norm"),
            Metric("actor/lr", "", "learning rate"),
            Metric("actor/muon_lr", "", "learning rate of the matrices that Muon updates"),
        ),
    ),
    Section(
        "Value update",
        "If a critic is trained (`algorithm.adv_estimator=gae`). Averages over the "
        "mini-batches of one step.",
        (
            Metric("critic/vf_loss", "reward^2", "clipped value loss"),
            Metric(
                "critic/vf_clipfrac",
                "share",
                "tokens for which the clipped error is larger than the unclipped one",
            ),
            Metric(
                "critic/vpred_mean", "reward", "mean value predicted by the weights in training"
            ),
            Metric(
                "critic/vf_explained_var",
                "share",
                "the returns' variance that is explained by the values before the update",
            ),
            Metric("critic/values/{mean,max,min}", "reward", "values before the update"),
            Metric("critic/grad_norm", "", "gradient norm before clipping"),
            Metric("critic/lr", "", "learning rate"),
            Metric("critic/muon_lr", "", "learning rate of the matrices that Muon updates"),
            Metric(
                "critic/skipped_steps",
                "updates",
                "updates skipped because loss or gradient was not finite",
            ),
        ),
    ),
    Section(
        "Scores",
        "Over samples; advantages and returns over tokens. Failed samples have no "
        "score. (The name critic is VERL's; these metrics do not need a critic.)",
        (
            Metric(
                "critic/score/mean",
                "reward",
                "mean score from the reward function",
                headline="reward",
            ),
            Metric("critic/score/{max,min}", "reward", "largest and smallest score"),
            Metric(
                "critic/rewards/{mean,max,min}", "reward", "score after KL and length penalties"
            ),
            Metric("critic/advantages/{mean,max,min}", "", "advantages used in the update"),
            Metric("critic/returns/{mean,max,min}", "reward", "returns"),
            Metric("reward/<part>/{mean,max,min}", "reward", "a named part of the reward"),
        ),
    ),
    Section(
        "Lengths and turns",
        "A response is everything after the prompt, including tool replies.",
        (
            Metric("response_length/mean", "tokens", "mean response length", headline="length"),
            Metric("response_length/{max,min,median,p90}", "tokens", "spread of response lengths"),
            Metric("response_length/clip_ratio", "share", "responses with the maximum length"),
            Metric("response/aborted_ratio", "share", "samples that were aborted"),
            Metric("prompt_length/{mean,max,min}", "tokens", "prompt lengths"),
            Metric("prompt_length/clip_ratio", "share", "prompts with the maximum length"),
            Metric(
                "num_turns/{mean,max,min}", "turns", "prompt, assistant and tool turns together"
            ),
        ),
    ),
    Section(
        "Episodes",
        "Only of episodes with tools or an environment.",
        (
            Metric("episode/turns/{mean,max,min}", "turns", "turns of the policy per episode"),
            Metric(
                "episode/branches/{mean,max,min}",
                "branches",
                "branches per episode (multi_turn.history=rerender)",
            ),
            Metric("tool_call_counts/{mean,max,min}", "calls", "tool calls per episode"),
            Metric(
                "episode/problems/<reason>",
                "calls",
                "tool calls that could not be answered normally, by kind, in the step",
            ),
            Metric(
                "episode/truncated/<reason>",
                "episodes",
                "episodes that a budget ended, by budget, in the step",
            ),
            Metric(
                "episode/tool_seconds/{mean,max,min}",
                "s",
                "time in tools and environment per episode",
                wall_time=True,
            ),
            Metric("episode/<part>", "", "a metric of the environment, mean over episodes"),
        ),
    ),
    Section(
        "Rollout",
        "Generation of responses.",
        (
            Metric("rollout/num_prompts", "prompts", "groups in the step"),
            Metric("rollout/num_samples", "samples", "samples in the step"),
            Metric(
                "rollout/longest_over_median",
                "ratio",
                "longest response of a group divided by the group's median length, mean "
                "over groups: the long tail",
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
                "generation time with fewer than half of the peak number of running responses",
                wall_time=True,
            ),
            Metric(
                "rollout/idle_core_seconds",
                "s",
                "sum over this machine's cores of the seconds that the run left them idle "
                "during generation",
                wall_time=True,
            ),
            Metric(
                "rollout/used_idle_core_seconds",
                "s",
                "part of these core seconds that a separate process computed in (opportunistic "
                "co-training)",
                wall_time=True,
            ),
            Metric("rollout/num_dropped_groups", "groups", "groups that a filter dropped"),
            Metric("rollout/num_dropped_groups/<reason>", "groups", "the same for each reason"),
            Metric(
                "train/num_gen_batches",
                "batches",
                "batches of prompts generated to fill one batch with groups that the filter "
                "keeps (VERL's name)",
            ),
            Metric(
                "rollout/num_carried_over",
                "samples",
                "unfinished samples that a later step continues",
            ),
            Metric(
                "rollout/staleness/{mean,max}",
                "versions",
                "policy versions between the policy that sampled a token and the policy that is "
                "updated on it",
            ),
        ),
    ),
    Section(
        "Rollout correction",
        "With `algorithm.rollout_correction`: the trainer's policy compared with the "
        "policy that sampled the rollout. rho is a token's log-ratio: the trainer's "
        "log-prob minus the rollout's.",
        (
            Metric("rollout_corr/{kl,k3_kl}", "nats", "mean of -rho; mean of e^rho - 1 - rho"),
            Metric(
                "rollout_corr/{chi2_token,chi2_seq}",
                "",
                "chi-squared divergence over tokens; over responses",
            ),
            Metric(
                "rollout_corr/{training_ppl,rollout_ppl}",
                "",
                "mean perplexity of responses under the trainer's and the rollout's policy",
            ),
            Metric(
                "rollout_corr/{training_log_ppl,rollout_log_ppl}",
                "nats",
                "mean logarithm of these perplexities",
            ),
            Metric(
                "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}",
                "nats",
                "log-perplexity of the trainer minus that of the rollout",
            ),
            Metric("rollout_corr/ppl_ratio", "", "mean of e to the power of that difference"),
            Metric(
                "rollout_corr/rollout_is_{mean,std,min,max,eff_sample_size}",
                "",
                "importance weights over tokens: mean, min and max before truncation, std and "
                "eff_sample_size of the weights in use",
            ),
            Metric(
                "rollout_corr/rollout_is_ratio_fraction_{high,low}",
                "share",
                "weights above the upper bound; below the lower bound",
            ),
            Metric(
                "rollout_corr/rollout_is_seq_{mean,std,min,max,max_deviation}",
                "",
                "statistics of each response's mean weight",
            ),
            Metric(
                "rollout_corr/rollout_is_seq_fraction_{high,low}",
                "share",
                "responses whose mean weight is above the upper bound; below the lower bound",
            ),
            Metric(
                "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
                "share",
                "rejected tokens; responses with a rejected token",
            ),
            Metric(
                "rollout_corr/rollout_rs_<rule>_{masked_fraction,seq_masked_fraction}",
                "share",
                "the same for one rule",
            ),
            Metric(
                "rollout_corr/rollout_rs_<rule>_{mean,min,max}",
                "",
                "the value that the rule compares with its threshold",
            ),
            Metric(
                "rollout_corr/outside_support",
                "tokens",
                "sampled tokens that the trainer's support replay would not have kept",
            ),
            Metric(
                "rollout_corr/rollout_is_veto_fraction", "share", "responses removed by the veto"
            ),
            Metric(
                "rollout_corr/rollout_is_catastrophic_token_fraction",
                "share",
                "tokens that caused the veto",
            ),
        ),
    ),
    Section(
        "Run",
        "Progress of the run, and agreement between rollout and trainer.",
        (
            Metric("training/global_step", "steps", "finished steps"),
            Metric("training/epoch", "epochs", "passes over the prompts"),
            Metric("training/policy_version", "versions", "published weight updates"),
            Metric(
                "training/num_zero_variance_groups",
                "groups",
                "groups of two or more samples with equal scores; they have no learning signal",
            ),
            Metric(
                "training/num_failed_rewards",
                "samples",
                "samples whose engine, tool or reward failed",
            ),
            Metric("training/num_failed_rewards/<reason>", "samples", "the same for each reason"),
            Metric(
                "training/num_lone_samples",
                "samples",
                "samples left out because all others of their group failed, so there is nothing "
                "to compare with",
            ),
            Metric(
                "training/skipped_batch",
                "0 or 1",
                "1 if no sample could be trained on and the update was skipped",
            ),
            Metric(
                "training/skipped_steps",
                "steps",
                "optimizer steps skipped because the gradient was not finite",
            ),
            Metric(
                "training/rollout_probs_diff_{max,mean}",
                "probability",
                "difference between a sampled token's probability in rollout and trainer; this "
                "metric and the next two cover the first optimizer step of the batch",
            ),
            Metric(
                "training/rollout_log_probs_bitwise_equal",
                "share",
                "sampled tokens whose log-prob is bitwise equal in rollout and trainer",
            ),
            Metric(
                "training/rollout_log_probs_differing",
                "tokens",
                "sampled tokens whose log-prob differs between rollout and trainer; 0 in exact "
                "mode",
            ),
        ),
    ),
    Section(
        "Validation",
        "`<source>` is the data source; N is the number of responses per prompt. A "
        "failed sample counts as wrong.",
        (
            Metric(
                "val-core/<source>/acc/mean@<N>",
                "share",
                "accuracy: share of right responses",
                headline="accuracy",
            ),
            Metric(
                "val-aux/<source>/acc/mean@<N>/{ci_low,ci_high}",
                "share",
                "95 % Wilson interval of this accuracy; a prompt counts as one trial",
            ),
            Metric(
                "val-aux/<source>/acc/std@<N>",
                "share",
                "standard deviation over the N responses to a prompt, mean over prompts",
            ),
            Metric(
                "val-aux/<source>/acc/pass@<k>",
                "share",
                "probability of a right response among k of the N responses (exact: drawn "
                "without replacement)",
            ),
            Metric(
                "val-core/<source>/acc/best@<N>/mean",
                "share",
                "the same for N, by VERL's resampling: 1,000 draws with replacement, seed 42",
            ),
            Metric(
                "val-core/<source>/acc/maj@<N>/mean",
                "share",
                "accuracy of the most frequent of N answers, if the reward function returns `pred`",
            ),
            Metric(
                "val-aux/<source>/acc/{best,worst,maj}@<k>/{mean,std}",
                "share",
                "best, worst and majority answer of k by the same resampling: mean and standard "
                "deviation over the draws",
            ),
            Metric("val-aux/<source>/num_prompts", "prompts", "evaluated prompts"),
            Metric("val-aux/<source>/num_failed", "samples", "failed responses"),
            Metric("val-aux/<source>/response_length/{mean,max}", "tokens", "response lengths"),
            Metric(
                "val-aux/<source>/response_length/clip_ratio",
                "share",
                "responses with the maximum length",
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
            Metric("sft/muon_lr", "", "learning rate of the matrices that Muon updates"),
            Metric("sft/grad_norm", "", "gradient norm before clipping", headline="grad_norm"),
            Metric("sft/tokens", "tokens", "target tokens of the step"),
            Metric(
                "sft/tokens_per_second",
                "tokens/s",
                "tokens per second, prompt tokens included",
                wall_time=True,
                headline="tok/s",
            ),
        ),
    ),
    Section(
        "Speculation",
        "Decode steps of the rollout engine; only with `speculative.enable`.",
        (
            Metric(
                "spec/accept_length",
                "tokens",
                "mean accepted length: tokens per verification, including the policy's own next "
                "token",
                wall_time=True,
                headline="accept",
            ),
            Metric(
                "spec/on_fraction",
                "share",
                "share of decoding time in steps with drafts",
                wall_time=True,
            ),
            Metric(
                "spec/head_fraction",
                "share",
                "draft tokens from the draft head (the others come from history)",
                wall_time=True,
            ),
            Metric(
                "spec/recess_fraction",
                "share",
                "decode steps in rollouts without drafts: in speculation backoff, because drafts "
                "gained nothing before, or before the first training of a new draft head",
                wall_time=True,
            ),
            Metric(
                "spec/plan", "tokens", "draft depth, mean over steps with drafts", wall_time=True
            ),
            Metric(
                "spec/acceptance_rate_<k>",
                "share",
                "verifications that accepted k drafts, among those with drafts of depth k or "
                "more; 16 includes all deeper drafts",
                wall_time=True,
            ),
            Metric(
                "spec/plan_seconds/{bs_1,bs_4,bs_16,bs_64,bs_more}/<plan>",
                "s",
                "decode time by class of running requests (as in the next row) and by draft plan "
                "(depth_topk_verified, or off)",
                wall_time=True,
            ),
            Metric(
                "spec/tokens_per_second/{bs_1,bs_4,bs_16,bs_64,bs_more}",
                "tokens/s",
                "tokens per second of decode steps, by class of running requests: 1, 2 to 4, 5 to "
                "16, 17 to 64, more than 64",
                wall_time=True,
            ),
        ),
    ),
    Section(
        "Draft head",
        "Losses and accuracy are averages over the tokens of one step that can be "
        "drafted. Acceptance is measured on held-out responses, with the noise that "
        "sampled them.",
        (
            Metric("draft/loss", "", "weighted sum of the losses below", headline="loss"),
            Metric("draft/value_loss", "", "smooth L1 between predicted and true features"),
            Metric("draft/soft_loss", "nats", "cross-entropy to the policy's distribution"),
            Metric(
                "draft/acceptance_loss",
                "nats",
                "-log of the probability that a draft token sampled from the head is accepted; "
                "only with `acceptance_weight` above 0",
            ),
            Metric(
                "draft/topk_mass_loss",
                "nats",
                "-log of the policy's probability mass on the head's best tokens; only with "
                "`topk_mass_weight` above 0",
            ),
            Metric(
                "draft/accuracy",
                "share",
                "first drafts whose likeliest token is also the policy's likeliest token",
                headline="accuracy",
            ),
            Metric("draft/val_soft_loss", "nats", "`draft/soft_loss` on the held-out responses"),
            Metric("draft/val_accuracy", "share", "`draft/accuracy` on the held-out responses"),
            Metric("draft/slots", "tokens", "tokens of the step that can be drafted"),
            Metric("draft/lr", "", "learning rate"),
            Metric("draft/muon_lr", "", "learning rate of the matrices that Muon updates"),
            Metric("draft/grad_norm", "", "gradient norm before clipping"),
            Metric(
                "draft/tokens_per_second",
                "tokens/s",
                "tokens per second of training steps, all tokens included",
                wall_time=True,
                headline="tok/s",
            ),
            Metric(
                "draft/accept_depth_<k>",
                "share",
                "chains (one starts after each token) whose first k draft tokens are accepted",
            ),
            Metric(
                "draft/accept_length_<k>",
                "tokens",
                "mean accepted length of a chain of k drafts, including the policy's own next "
                "token",
            ),
        ),
    ),
    Section(
        "Co-training of the draft head",
        "Logged after each step; losses and acceptance only after steps with a slice of "
        "training. A slice is one training of the head, with up to "
        "`updates_per_training` optimizer steps. `before` is the head in use, `after` "
        "the trained head; both are measured on held-out responses, with the noise that "
        "sampled them. With `speculative.train.mode=opportunistic`, all of these metrics "
        "depend on time.",
        (
            Metric("drafter/loss", "", "weighted sum of the losses below, mean over the slice"),
            Metric("drafter/feature_loss", "", "smooth L1 between predicted and true features"),
            Metric("drafter/token_loss", "nats", "cross-entropy to the policy's distribution"),
            Metric(
                "drafter/acceptance_loss",
                "nats",
                "-log of the probability that a draft token sampled from the head is accepted; "
                "only with `acceptance_weight` above 0",
            ),
            Metric(
                "drafter/topk_mass_loss",
                "nats",
                "-log of the policy's probability mass on the head's best tokens; only with "
                "`topk_mass_weight` above 0",
            ),
            Metric("drafter/updates", "steps", "optimizer steps so far"),
            Metric("drafter/tokens_seen", "tokens", "training tokens so far"),
            Metric("drafter/seconds", "s", "duration of the slice", wall_time=True),
            Metric("drafter/version", "", "version of the head in use"),
            Metric("drafter/publishes", "heads", "trained heads published to the engines so far"),
            Metric(
                "drafter/publishes_in_rollouts",
                "heads",
                "published heads so far that a separate process sent during generation and that "
                "the engines used at once",
                wall_time=True,
            ),
            Metric(
                "drafter/staleness_versions",
                "versions",
                "policy versions between the newest responses that the head in use has learned "
                "from and the policy that decodes next; left out before the head has learned",
            ),
            Metric(
                "drafter/decoded_samples",
                "samples",
                "responses of the step whose features came from the engine's decoding",
            ),
            Metric(
                "drafter/hold_backs",
                "heads",
                "trained heads not published, because they accepted fewer drafts than the head "
                "in use by more than chance, or could not be measured",
            ),
            Metric(
                "drafter/restarts",
                "processes",
                "times that the process that trains the head ended and was started again",
            ),
            Metric(
                "drafter/cpu_seconds",
                "s",
                "CPU time of all slices so far in a separate process",
                wall_time=True,
            ),
            Metric(
                "drafter/failed_slices", "slices", "slices ended because the loss was not finite"
            ),
            Metric("drafter/buffer_bytes", "bytes", "size of the features of collected responses"),
            Metric("drafter/buffer_samples", "samples", "collected responses"),
            Metric(
                "drafter/evicted_samples",
                "samples",
                "responses removed so far because the buffer was full",
            ),
            Metric(
                "drafter/vocabulary_coverage/before",
                "share",
                "written tokens, newer ones with more weight, that are in the draft vocabulary "
                "before the slice (heads with a draft vocabulary)",
            ),
            Metric(
                "drafter/vocabulary_coverage",
                "share",
                "the same, with the draft vocabulary of the head in training",
            ),
            Metric(
                "drafter/vocabulary_tokens",
                "tokens",
                "size of the draft vocabulary of the head in training (heads that have one)",
            ),
            Metric("drafter/acceptance_rate", "share", "accepted drafts of the trained head"),
            Metric(
                "drafter/acceptance_rate/{before,after}",
                "share",
                "accepted drafts among all drafts",
            ),
            Metric(
                "drafter/accept_length/{before,after}",
                "tokens",
                "mean accepted length, including the policy's own next token",
            ),
            Metric(
                "drafter/acceptance_rate_<k>/{before,after}",
                "share",
                "chains (one starts after each token) whose first k draft tokens are accepted",
            ),
        ),
    ),
    Section(
        "Servers",
        "With `rollout.name=vllm`: the [check](servers.md#the-check) of all servers after a weight "
        "update.",
        (
            Metric(
                "server/checks/{new,old,wrong,undecided}",
                "checks",
                "comparisons of a server with the trainer, by outcome",
            ),
            Metric(
                "server/share",
                "share",
                "how much of the change since the last confirmed weights a server shows: 1 is the "
                "new weights, 0 the old ones; the smallest of all servers",
            ),
            Metric(
                "server/difference",
                "nats",
                "root mean square difference of log-probs between a server and the trainer; the "
                "largest of all servers",
            ),
        ),
    ),
    Section(
        "Time and machine",
        "Wall time: these metrics differ between runs that compute the same.",
        (
            Metric(
                "timing_s/{gen,tools,reward,adv,old_log_prob,ref,values,update_critic,update_actor,sync,drafter}",
                "s",
                "stages of the step, which do not overlap: generation, the wait for tools while "
                "no response is generated, the wait for rewards after all episodes have ended, "
                "advantages, log-probs of the policy and of the reference, values, updates of "
                "critic and policy, weights to the engines, "
                "training of the draft head",
                wall_time=True,
            ),
            Metric(
                "timing_s/gen/{prefill,decode,draft,verify,wait}",
                "s",
                "engine time in gen, which sums to gen: prefill, steps without drafts, "
                "drafting, verification, waiting",
                wall_time=True,
            ),
            Metric(
                "timing_s/sync/{write,install,score,check}",
                "s",
                "parts of sync with servers: new weights written to memory, loaded by all servers, "
                "scored by the trainer, and compared with the servers",
                wall_time=True,
            ),
            Metric(
                "timing_s/other",
                "s",
                "rest of the step: this and the stages sum to timing_s/step",
                wall_time=True,
            ),
            Metric(
                "timing_s/{testing,dump_rollout_generations}",
                "s",
                "duration of work after the step, which is not part of it: validation, saving "
                "rollouts",
                wall_time=True,
            ),
            Metric(
                "timing_s/save_checkpoint",
                "s",
                "how long the last checkpoint, saved after the previous step, made the run "
                "wait; not part of a step, because a step is logged before its checkpoint is "
                "saved",
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
                "duration per token: gen per response token, update_actor per token of the batch",
                wall_time=True,
            ),
            Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step"),
            Metric("perf/time_per_step", "s", "equal to timing_s/step", wall_time=True),
            Metric(
                "perf/throughput", "tokens/s", "total_num_tokens / time_per_step", wall_time=True
            ),
            Metric("perf/cpu_memory_used_gb", "GB", "memory in use on the machine", wall_time=True),
        ),
    ),
)

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS for metric in section.metrics)


def find(name: str) -> Metric | None:
    """Return the row that describes `name`, or None."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ValueError for names that no row of the table describes."""
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
    """Return the `metrics` that must be equal, bit for bit, in equal runs.

    Metrics that depend on wall time or on the machine's load are removed. Unknown names stay,
    because removing them could hide a difference.
    """
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        metric = find(name)
        if metric is None or not metric.wall_time:
            kept[name] = value
    return kept


def markdown() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Printed by `python -m slipstream.metrics.names`; edit the table in names.py. -->",
        "",
        "On this page you can look up every number that a run logs. The [glossary](glossary.md)",
        "explains terms.",
        "",
        "`metrics.jsonl` has one line per step:",
        '`{"step": 12, "data": {"critic/score/mean": 0.41, ...}}`. In the tables:',
        "",
        "- `{mean,max}` stands for two metrics, and `<source>` for a name from your data.",
        "- A *share* is between 0 and 1: the share of the items that the meaning describes.",
        "- A metric marked *t* depends on wall time. All others are equal, bit for bit, in two",
        "  runs with the same configuration, seed and number of threads.",
        "- A statistic without values is left out, for example the mean score of a step in which",
        "  all samples failed.",
        '- An infinity or a NaN is written as `"Infinity"`, `"-Infinity"` or `"NaN"`.',
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
