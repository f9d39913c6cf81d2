"""GRPO with lossless speculative decoding, in one file to read from top to bottom.

`python examples/grpo_from_scratch.py` takes half a minute on two CPU cores. A tiny decoder imitates
worked solutions of eight Countdown problems. Then GRPO (https://arxiv.org/abs/2402.03300) with the
PPO-clip loss (https://arxiv.org/abs/1707.06347) trains it to solve them.
The library's loop, `slipstream.loops.rl.run_rl_training`, adds batches, a KV cache, asynchronous
rollouts and more. `tests/test_examples.py` runs both from the same weights: token ids, log-probs,
rewards, advantages, losses and final weights are equal bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import astuple, dataclass, field
from itertools import pairwise

import torch
from torch.nn import functional as F

from slipstream.algorithms import chunked_token_log_probs
from slipstream.environment.countdown import CountdownTask
from slipstream.models import Decoder, ModelConfig, PackedDecoder
from slipstream.rewards.countdown import compute_score
from slipstream.sampling import gumbel_noise, key_words
from slipstream.types import NoiseKey, Prompt

SEED, PROBLEMS, GROUP_SIZE = 1, 8, 8  # GROUP_SIZE: responses per problem and step
STEPS, EPOCHS = 6, 2  # EPOCHS: optimizer steps per GRPO step, on the same responses
LEARNING_RATE, CLIP, MAX_GRAD_NORM, MAX_NEW_TOKENS, NUM_DRAFTS = 1e-3, 0.2, 1.0, 40, 3
Lookup = dict[tuple[int, int], int]  # two tokens -> the token that last followed them
TASK = CountdownTask(SEED, min_numbers=3, max_numbers=3, max_number=6, give_up=0.5)
PROMPTS = [TASK.prompt("train", index) for index in range(PROBLEMS)]
MODEL = ModelConfig(
    family="qwen3",
    vocab_size=len(TASK.tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    initializer_range=0.1,
)


# 1. Model: `Decoder` owns the weights; `Decoder.pack` prepares them for forward passes.
def hidden_states(policy: PackedDecoder, tokens: list[int]) -> torch.Tensor:
    """(T, D): row t predicts token t + 1. There is no KV cache: each call computes all rows."""
    # Slipstream's CPU kernels compute each row by itself. Torch's products need padding for that.
    padding = 0 if policy.row_multiple == 1 else -len(tokens) % 16
    ids_BT = torch.tensor([tokens + [0] * padding])
    return policy.forward(ids_BT, torch.arange(ids_BT.shape[1])[None]).final[0]


# 2. Rollout with draft tokens.
@dataclass
class Sample:
    prompt: Prompt
    key: NoiseKey
    tokens: list[int]  # of prompt and response
    log_probs: list[float] = field(default_factory=list)  # of the response when it was sampled
    forward_passes: int = 0
    reward: float = 0.0
    advantage: float = 0.0


def draft(lookup: Lookup, tokens: list[int], count: int) -> list[int]:
    """Up to `count` draft tokens to follow `tokens`; no weights and no training are needed."""
    longer = list(tokens)
    while len(longer) < len(tokens) + count and (longer[-2], longer[-1]) in lookup:
        longer.append(lookup[longer[-2], longer[-1]])
    return longer[len(tokens) :]


@torch.no_grad()
def rollout(policy: PackedDecoder, sample: Sample, lookup: Lookup, num_drafts: int) -> Sample:
    """Sample a response; each forward pass verifies up to `num_drafts` draft tokens.

    argmax(log p + Gumbel noise) is a sample from p. The noise is a hash of key, position and token
    id, so a sampled token depends on the tokens before it and not on the drafts.
    """
    words = torch.tensor([key_words(astuple(sample.key))], dtype=torch.int32)
    while True:
        length, drafts = len(sample.tokens), draft(lookup, sample.tokens, num_drafts)
        # One row for the next token, and one for the token after each draft.
        logits = policy.lm_head(hidden_states(policy, sample.tokens + drafts))
        log_p = torch.log_softmax(logits, dim=-1)[length - 1 : length + len(drafts)]
        noise = gumbel_noise(words, torch.arange(length, length + len(log_p)), MODEL.vocab_size)
        chosen: list[int] = (log_p.double() + noise).argmax(dim=-1).tolist()
        sample.forward_passes += 1
        for row, token in enumerate(chosen):
            sample.tokens.append(token)
            sample.log_probs.append(log_p[row, token].item())
            if token == TASK.tokenizer.eos_token_id or len(sample.log_probs) == MAX_NEW_TOKENS:
                lookup.update(zip(pairwise(sample.tokens), sample.tokens[2:], strict=False))
                return sample
            # The next row is valid only if its draft token equals the token just sampled.
            if row == len(drafts) or drafts[row] != token:
                break


# 3. Reward and advantage.
def score(group: list[Sample]) -> None:
    """Reward 1 for a correct answer, else 0; advantage (reward - mean) / std of the group."""
    for s in group:
        text = TASK.tokenizer.decode(s.tokens[len(s.prompt.ids) :], skip_special_tokens=True)
        s.reward = compute_score("countdown", text, s.prompt.ground_truth)
    rewards = torch.tensor([s.reward for s in group], dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for s, advantage in zip(group, advantages.float().tolist(), strict=True):
        s.advantage = advantage


# 4. PPO-clip loss and update.
def response_log_probs(policy: PackedDecoder, sample: Sample) -> torch.Tensor:
    """(N,): log-softmax at the response tokens, with gradients."""
    start, count = len(sample.prompt.ids), len(sample.log_probs)
    # Zero rows up to a multiple of four, and to at least twelve, as in the library: the number of
    # rows decides the order in which a matrix product sums gradients.
    fill = max(-count % 4, 12 - count)
    hidden = F.pad(hidden_states(policy, sample.tokens)[start - 1 :][:count], (0, 0, 0, fill))
    labels = torch.tensor(sample.tokens[start:] + [0] * fill)
    weight, head = policy.head
    log_probs, _ = chunked_token_log_probs(hidden, weight, labels, product=head, keep_bytes=1 << 30)
    return log_probs[:count]


def update(policy: Decoder, optimizer: torch.optim.Optimizer, samples: list[Sample]) -> float:
    """One optimizer step on all samples; returns the loss, a mean over response tokens."""
    num_tokens, total = sum(len(s.log_probs) for s in samples), 0.0
    # Shortest first, as in the library: the order of a floating-point sum decides its last bits.
    for s in sorted(samples, key=lambda s: len(s.tokens)):
        log_probs = response_log_probs(policy.pack(torch.float32), s)
        # The rollout's log-probs are the old policy's, bit for bit: nothing is computed again.
        ratio = (log_probs - torch.tensor(s.log_probs)).exp()
        # The library also clips where advantage < 0 and ratio > 3. No ratio gets that far here.
        loss_N = torch.maximum(-s.advantage * ratio, -s.advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
        # Zeros for the prompt and for padding: the library sums a whole padded row.
        loss = F.pad(loss_N, (len(s.prompt.ids), -len(s.tokens) % 16)).sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total


# 5. Training.
def train(policy: Decoder, num_drafts: int, steps: int = STEPS) -> tuple[list[Sample], list[float]]:
    """Run GRPO on `policy` in place; returns all samples and the loss of each step."""
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    lookup, history, losses = Lookup(), list[Sample](), list[float]()
    for step in range(steps):
        samples, packed = list[Sample](), policy.pack(torch.float32)
        for p in PROMPTS:
            keys = [NoiseKey(SEED, epoch=step, uid=p.uid, index=i) for i in range(GROUP_SIZE)]
            group = [rollout(packed, Sample(p, key, [*p.ids]), lookup, num_drafts) for key in keys]
            score(group)
            samples += group
        losses.append(sum(update(policy, optimizer, samples) for _ in range(EPOCHS)) / EPOCHS)
        history += samples
        reward = sum(s.reward for s in samples) / len(samples)
        speed = sum(len(s.log_probs) for s in samples) / sum(s.forward_passes for s in samples)
        print(f"step {step}: reward {reward:.2f}, loss {losses[-1]:+.4f}, tokens/pass {speed:.2f}")
    return history, losses


def imitate(updates: int = 1300) -> Decoder:
    """The policy that GRPO starts from: cross-entropy on worked solutions, one per update."""
    policy = Decoder(MODEL)
    policy.init_weights(SEED)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    for i in range(updates):
        messages = TASK.demonstration("train", i % PROBLEMS, variant=i)
        tokens = TASK.tokenizer.apply_chat_template(messages, return_dict=False)
        packed, start = policy.pack(torch.float32), len(PROMPTS[i % PROBLEMS].ids)
        logits = packed.lm_head(hidden_states(packed, tokens))[start - 1 : len(tokens) - 1]
        loss = F.cross_entropy(logits, torch.tensor(tokens[start:]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return policy


def main() -> None:
    torch.set_num_threads(1)  # Matrices this small are slower on several threads.
    drafted = imitate()
    plain = copy.deepcopy(drafted)
    print(f"GRPO with up to {NUM_DRAFTS} draft tokens per forward pass")
    fast, _ = train(drafted, NUM_DRAFTS)
    print("GRPO without draft tokens, from the same weights")
    slow, _ = train(plain, 0)
    passes = [sum(s.forward_passes for s in samples) for samples in (fast, slow)]
    print(f"forward passes: {passes[0]:,} with draft tokens, {passes[1]:,} without; ", end="")
    print(f"token ids equal: {[s.tokens for s in fast] == [s.tokens for s in slow]}; ", end="")
    print("weights equal:", all(map(torch.equal, drafted.parameters(), plain.parameters())))


if __name__ == "__main__":
    main()
