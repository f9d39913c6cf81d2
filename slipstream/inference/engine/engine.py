"""The synchronous core of the embedded engine: add requests, call `step`, receive generations.

Only one thread may call it. It does not know event loops, prompts as text, rewards or training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.inference.engine.batch_sampling import BatchSampling, sampling_rows
from slipstream.inference.engine.counters import Counters
from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.engine.kv_rows import KVRows
from slipstream.inference.engine.kv_store import make_store
from slipstream.inference.engine.prefill import Prefill
from slipstream.inference.engine.prefix_cache import BLOCK, PrefixCache
from slipstream.inference.engine.request import Decode, Running
from slipstream.inference.engine.runner import Runner
from slipstream.inference.engine.scheduler import Admission, Scheduler
from slipstream.inference.engine.settings import EngineSettings
from slipstream.inference.engine.verification import make_verification
from slipstream.inference.protocol import EngineStats, check_request
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import (
    DraftBatch,
    DraftTree,
    LearningProposer,
    Proposer,
    aux_layers_of,
)
from slipstream.inference.speculation.selector import (
    UNTIL_HEAD,
    HasMinAcceptance,
    ListsChoices,
    StepRecord,
    StrategySelector,
)
from slipstream.kernels.team import single_threaded
from slipstream.metrics.resident import FreedMemory
from slipstream.models.decoder import Decoder, HiddenStates
from slipstream.models.numerics import check_widths
from slipstream.sampling.accept import accepted_path
from slipstream.sampling.choose import Choice
from slipstream.sampling.noise import key_words
from slipstream.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    StopReason,
    UpdateKind,
    WeightUpdate,
)


class Engine:
    """Generates with one policy by continuous batching, with or without speculative decoding."""

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        *,
        decode: Decode | None = None,
        proposer: Proposer | None = None,
        plan: DraftPlan = OFF,
        selector: StrategySelector | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        """`decode` turns token ids into text, for stop strings and `Generation.text`.

        `proposer` makes the drafts. `selector` chooses the draft plan of each step; without it
        `plan` is used, which can be changed between steps. `aux_layers` are layers whose inputs are
        part of the hidden states; the proposer's auxiliary layers are added automatically.

        Raises ConfigError if exact mode does not support the model's widths, if a plan or selector
        is given without a proposer, or if `aux_layers` are not those of the proposer.
        """
        needed_layers = aux_layers_of(proposer)
        if aux_layers and needed_layers and aux_layers != needed_layers:
            raise ConfigError(
                f"engine: aux_layers={list(aux_layers)}, but the proposer needs "
                f"{list(needed_layers)}; leave out aux_layers"
            )
        aux_layers = needed_layers or aux_layers
        config = decoder.config
        check_widths(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            head_dim=config.head_dim,
        )
        self.settings = settings
        self.version = 0
        self._decode_text = decode
        self._runner = Runner(
            decoder,
            settings.dtype,
            eager=settings.enforce_eager,
            aux_layers=aux_layers,
            choices=selector.choices if isinstance(selector, ListsChoices) else None,
            one_copy=settings.one_copy,
        )
        self._scheduler = Scheduler(
            self._new_store(
                self._runner.row_multiple, lambda size: self._scheduler.shrink_caches(size)
            ),
            max_num_seqs=settings.max_num_seqs,
            max_prefill_tokens=settings.max_prefill_tokens,
            on_row_freed=self._row_freed,
            prefix_cache=PrefixCache() if settings.prefix_caching else None,
            stagger=settings.stagger_samples,
        )
        self._prefill = Prefill(
            self._runner,
            self._scheduler,
            max_tokens=settings.max_prefill_tokens,
            new_store=self._new_store,
        )
        self._own_proposer, self._own_selector = proposer, selector
        self._min_acceptance: HasMinAcceptance | None = (
            selector if isinstance(selector, HasMinAcceptance) else None
        )
        # Both are None while speculation is off. The proposer is also None during backoff,
        # and before the first training of an untrained head.
        self._proposer, self._selector = proposer, selector
        # Remaining steps without a proposer, and whether the engine has no requests.
        self._backoff_steps, self._idle = 0, True
        if selector is not None and proposer is None:
            raise ConfigError("engine: a selector of draft plans needs a proposer")
        self.plan = plan
        # Whether the next drafts include draft catch-up, after a step without drafts or with new
        # requests.
        self._needs_catch_up = True
        # The sampling settings of the running batch; None after the batch has changed.
        self._sampling: BatchSampling | None = None
        self._ended: list[Generation] = []
        self._freed = FreedMemory()
        self.lent: Callable[[bool], None] = lambda free: None
        """Called with True when decoding starts to use one thread only, and with False when it
        uses all threads again (`EngineSettings.one_thread_below`)."""
        self._lending = False
        # Number of weight loads. Versions may repeat: a resumed run publishes its first one again.
        self._weights = 0
        self._counters = Counters()

    @property
    def plan(self) -> DraftPlan:
        """The draft plan without a selector. It may be set between steps."""
        return self._plan

    @plan.setter
    def plan(self, plan: DraftPlan) -> None:
        if plan != OFF and self._own_proposer is None:
            raise ConfigError(f"engine: draft plan {plan} needs a proposer")
        self._plan = plan

    def speculate(self, on: bool) -> None:
        """Switch speculation on or off. It changes the speed, not the tokens.

        Raises EngineError if the engine has no proposer, or if requests run or wait, because a
        proposer must see requests from their start.
        """
        if self._own_proposer is None:
            raise EngineError("speculate: this engine was made without a draft proposer")
        if not self._scheduler.idle:
            raise EngineError("speculate: requests are running; let them end, or abort them")
        self._proposer = self._own_proposer if on else None
        self._selector = self._own_selector if on else None
        self._backoff_steps = 0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        config = self._runner.config
        limit = min(self.settings.max_model_len, config.context_limit.tokens)
        check_request(request, vocab_size=config.vocab_size, max_model_len=limit)
        name = request.request_id
        if self._scheduler.knows(name):
            raise RequestError(
                f"request {name!r}: a request with this request_id is already running"
            )
        if request.params.stop and self._decode_text is None:
            raise RequestError(
                f"request {name!r}: stop strings need an engine with a tokenizer "
                "(its argument `decode`)"
            )
        context = [*request.prompt_ids, *request.prior_ids]
        store, most = self._scheduler.store, len(context) + request.params.max_tokens
        if store.size([most]) > store.budget:
            raise RequestError(
                f"request {name!r}: {len(context)} + {request.params.max_tokens} tokens do not fit "
                f"the KV budget of {self.settings.kv_budget_bytes} bytes; shorten the prompt, "
                "lower max_tokens or raise actor_rollout_ref.rollout.kv_cache_bytes"
            )
        self._scheduler.add(
            Running(
                request=request,
                key=key_words(request.key.parts),
                eos_ids=frozenset(config.eos_token_ids),
                context=context,
            )
        )

    def step(self) -> list[Generation]:
        """Start waiting requests that fit, decode at least one token for every running request, and
        return the generations that ended."""
        with torch.inference_mode():
            # Before a prefill, because it needs all cores.
            self._update_lending()
            self._admit()
            self._update_lending()
            with single_threaded(self._lending):
                self._decode()
            self._when_idle()
        ended, self._ended = self._ended, []
        return _without_inference_tensors(ended)

    def has_work(self) -> bool:
        """Whether requests run or wait, or ended ones were not returned yet."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended)

    def run(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate responses to `requests` and return them in this order. No other requests may be
        in the engine."""
        for request in requests:
            self.add(request)
        done: dict[str, Generation] = {}
        while self.has_work():
            done.update((g.request_id, g) for g in self.step())
        return [done[r.request_id] for r in requests]

    def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Stop requests (all if None) and return their partial generations. Unknown ids are
        ignored."""
        chosen = None if request_ids is None else set(request_ids)
        stopped = [r for r in self._scheduler.all() if chosen is None or r.request_id in chosen]
        with torch.inference_mode():
            # From the last row to the first, so that few rows move.
            for request in reversed(stopped):
                request.stop_reason = StopReason.ABORT
                self._scheduler.cache_kv(request, self._weights)
                self._scheduler.remove(request)
            self._when_idle()
        self._counters.aborted += len(stopped)
        generations = [request.generation(self._decode_text) for request in stopped]
        return _without_inference_tensors(generations)

    def interrupt(self, requested: bool) -> None:
        """Does nothing, because steps are short."""

    @torch.inference_mode()
    def preempt(self, request_ids: Sequence[str]) -> None:
        """Preempt running requests, as a lack of memory would. For tests."""
        for request in [r for r in self._scheduler.running if r.request_id in set(request_ids)]:
            self._scheduler.preempt(request, self._weights)
            self._counters.preempted += 1

    @torch.inference_mode()
    def update_weights(self, update: WeightUpdate) -> None:
        """Load new policy weights between two steps.

        `update.kv_policy` says what happens to the KV cache of running requests. If a new request
        is in chunked prefill, its prefill starts again with the new weights.

        Raises EngineError if the update does not fit the model. The old weights are kept then, but
        single-copy weights may be a mixture of old and new ones.
        """
        tensors = {} if self.settings.one_copy else self._runner.check(update)
        self._scheduler.drop_caches()
        if update.kv_policy is KVPolicy.RECOMPUTE:
            self._scheduler.requeue_all()
        else:
            self._save_preempted()
        if self.settings.one_copy:
            self._runner.overwrite(update)
        else:
            self._runner.load(tensors)
        self._weights += 1
        self.version = update.version
        if isinstance(self._own_proposer, LearningProposer):
            self._own_proposer.policy_changed()
        if self._own_selector is not None:
            self._own_selector.changed()

    def _update_lending(self) -> None:
        """Use one thread while few requests run, all threads otherwise, and report changes to
        `lent`."""
        running = len(self._scheduler.running)
        few = 0 < running <= self.settings.one_thread_below and not self._scheduler.waiting
        if few != self._lending:
            self._lending = few
            self.lent(few)

    def _when_idle(self) -> None:
        """If no request runs or waits, note that the next one starts a new rollout, and free
        memory."""
        self._idle = self._scheduler.idle
        if self._idle:
            self._update_lending()
        if self._idle and self.settings.free_cache_engine:
            self._runner.clear_graphs()
            self._scheduler.store.release()
            self._freed.give_back()

    def _save_preempted(self) -> None:
        """Recompute and save the keys and values of preempted requests, as long as the weights that
        belong to them are loaded."""
        for request in self._scheduler.unsaved():
            self._scheduler.save(request, self._prefill.recompute(request))

    def update_drafter(self, update: WeightUpdate) -> None:
        """Load new draft-head weights between two steps.

        Raises EngineError, and changes nothing, if the engine has no draft head or the update does
        not fit it.
        """
        if update.kind is not UpdateKind.DRAFT:
            raise EngineError(f"the drafter takes draft weights, got {update.kind.value}")
        if not isinstance(self._own_proposer, LearningProposer):
            raise EngineError(f"this engine has no draft head to update to {update.version}")
        self._own_proposer.update(update)
        if not update.version:
            # Version 0 is the head from before its first training: that of a resumed run.
            return
        if self._own_selector is not None:
            self._own_selector.changed(drafter=True)
        if self._backoff_steps > UNTIL_HEAD // 2:  # `UNTIL_HEAD` less the steps since then.
            self._backoff_steps = 1

    def stats(self) -> EngineStats:
        """Return the counters so far."""
        return self._counters.stats(
            version=self.version,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_bytes=self._scheduler.kv_bytes,
        )

    def _new_store(
        self, row_multiple: int = 1, before_growth: Callable[[int], None] | None = None
    ) -> KVRows:
        return make_store(
            self._runner.config,
            self._runner.dtype,
            self._runner.device,
            self.settings.kv_budget_bytes,
            row_multiple=row_multiple,
            before_growth=before_growth,
        )

    def _admit(self) -> None:
        """Start waiting requests that fit: prefill their contexts and sample their next tokens. If
        the first one needs chunked prefill, compute one chunk."""
        if self._idle and self._selector is not None and self._scheduler.waiting:
            requests = min(len(self._scheduler.waiting), self.settings.max_num_seqs)
            self._backoff_steps = self._selector.begin_rollout(requests)
            self._proposer = None if self._backoff_steps else self._own_proposer
        while self._scheduler.waiting:
            before = len(self._scheduler.running)
            admission = self._scheduler.admit(self._weights)
            started = time.perf_counter()
            if admission.long is not None:
                self._counters.prompt_tokens += self._prefill.chunk(admission.long, self._weights)
            elif admission.fresh or admission.restored:
                self._sampling = None
                self._start(admission, self._scheduler.running[before:])
            self._counters.prefill_seconds += time.perf_counter() - started
            if not admission.fresh and not admission.restored:
                return

    def _start(self, admission: Admission, admitted: list[Running]) -> None:
        """Start requests that have just got a row. Fresh ones are prefilled and sample a token."""
        states: Mapping[str, Tensor] = {}
        fresh = admission.fresh
        if fresh:
            prefilled = self._prefill.fresh(admission)
            states, hidden = prefilled.states, prefilled.last.final
            positions = torch.tensor([r.length for r in fresh], device=hidden.device)
            choice = self._runner.choose(hidden, positions, sampling_rows(fresh, hidden.device))
            for request in fresh:
                request.kv_weights = {self._weights}
                drafts = self._proposer is not None and len(request.request.prompt_ids) >= BLOCK
                if drafts or request.wants_context:
                    request.keep_features(states[request.request_id], for_drafts=drafts)
            self._counters.prompt_tokens += prefilled.computed
            self._counters.shared_prompt_tokens += prefilled.shared
            self._counters.reused_prompt_tokens += prefilled.reused
            trees = [DraftTree.chain(r.context[-1], ()) for r in fresh]
            self._accept(fresh, trees, choice, prefilled.last, range(len(fresh)))
        self._begin_drafts(admitted, states)
        self._finish_ended(admitted)

    def _begin_drafts(self, admitted: list[Running], states: Mapping[str, Tensor]) -> None:
        """Tell the proposer about requests that run now. `states` are context states by id."""
        self._needs_catch_up = True
        if self._proposer is not None:
            for request in admitted:
                name, prompt = request.request_id, request.request.prompt_ids
                known = states.get(name)
                features = None if known is None else self._runner.split(known).features
                self._proposer.begin(name, prompt, request.context, features)

    def _decode(self) -> None:
        """Run one decode step: at least one token for every running request."""
        preempted = self._scheduler.make_room(self._weights)
        running = list(self._scheduler.running)
        if not running:
            return
        started = time.perf_counter()
        device = self._runner.device
        if self._sampling is None:
            self._sampling = BatchSampling(running, device)
        sampling = self._sampling
        lengths = [request.length for request in running]
        positions_N = torch.from_numpy(np.array(lengths)).to(device)
        plan = self._choose_plan(lengths)
        trees = self._draft(running, plan, positions_N)
        proposed = time.perf_counter() - started
        # The number of tokens must be a multiple of `tokens_multiple`. With 4 tokens per request
        # and a multiple of 4, no padding requests are needed.
        multiple = self._runner.tokens_multiple
        multiple //= gcd(max(map(len, trees)), multiple)
        step = make_verification(
            trees, lengths, device, row_by_row=self._runner.row_by_row, multiple=multiple
        )
        hidden = self._runner.decode(self._scheduler.store, step)
        choice = self._runner.choose(hidden.final, step.next_positions, step.sampling(sampling))
        for request in running:
            request.kv_weights.add(self._weights)
        paths = self._accept(running, trees, choice, hidden, step.starts)
        tokens = [request.context[known:] for request, known in zip(running, lengths, strict=True)]
        self._move_accepted(paths, lengths)
        if self._proposer is not None:
            observing = time.perf_counter()
            features = step.states_on_paths(hidden.features, paths)
            self._proposer.observe(sampling.names, tokens, features)
            proposed += time.perf_counter() - observing
        self._finish_ended(running)
        self._counters.preempted += len(preempted)
        self._record(plan, trees, paths, tokens, time.perf_counter() - started, proposed)
        if self._backoff_steps:
            self._counters.recess_steps += 1
            self._backoff_steps -= 1
            if not self._backoff_steps:
                self._proposer = self._own_proposer
                self._begin_drafts(self._scheduler.running, {})

    def _record(
        self,
        plan: DraftPlan,
        trees: Sequence[DraftTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        seconds: float,
        proposed: float,
    ) -> None:
        """Count a decode step and report it to the selector.

        The step took `seconds`; the proposer took `proposed` of these. `tokens` are the new tokens
        of each request.
        """
        drafted = [len(tree) - 1 for tree in trees]
        drafts, count = sum(drafted), len(tokens)
        self._counters.decoded(count, sum(map(len, tokens)), seconds)
        if self._own_proposer is not None:
            self._counters.planned(plan if drafts else OFF, count, seconds)
        if drafts:
            by_head = sum(tree.by_head for tree in trees)
            self._counters.drafted(
                plan, drafted, by_head=by_head, seconds=seconds, proposing=proposed
            )
            for tree, new in zip(trees, tokens, strict=True):
                if len(tree) > 1:
                    self._counters.verified(tree.depth, len(new) - 1)
        if self._selector is not None and self._proposer is not None:
            step = StepRecord(
                running=count,
                plan=plan,
                seconds=seconds,
                drafted=drafted if drafts else (),
                accepted=[len(new) - 1 for new in tokens] if drafts else (),
                steady=plan == OFF or not self._needs_catch_up,
                straight=_first_child_chains(trees, paths, tokens) if plan.topk > 1 else (),
            )
            self._selector.record(step)
        self._needs_catch_up = drafts == 0

    def _choose_plan(self, lengths: Sequence[int]) -> DraftPlan:
        """Choose the draft plan of this step and reserve KV slots for its drafts. Returns OFF if
        they do not fit, so that no request is preempted because of drafts."""
        if self._proposer is None:
            return OFF
        rows = len(lengths)
        plan = self._plan if self._selector is None else self._selector.select(rows)
        if plan == OFF:
            return OFF
        drafts = plan.most_drafts(rows)
        longer = [length + drafts for length in lengths]
        if not self._scheduler.store.fits(longer):
            return OFF
        self._scheduler.store.reserve(longer)
        return plan

    def _draft(
        self,
        running: list[Running],
        plan: DraftPlan,
        positions_N: Tensor,
    ) -> list[DraftTree]:
        """Return a tree for each request: its last known token, and the drafts after it."""
        last = [request.context[-1] for request in running]
        if plan == OFF or self._proposer is None or self._sampling is None:
            return [DraftTree.chain(token, ()) for token in last]
        min_acceptance = 0.0
        if self._min_acceptance is not None and self._selector is not None:
            min_acceptance = self._min_acceptance.min_acceptance(len(running))
        store = self._scheduler.store
        batch = DraftBatch(
            request_ids=self._sampling.names,
            last=last,
            positions_N=positions_N,
            rows=self._sampling.rows,
            policy=self._runner.packed,
            min_acceptance=min_acceptance,
            kv=store.blocks if isinstance(store, BlockStore) else None,
        )
        return self._proposer.propose(batch, plan)

    def _accept(
        self,
        requests: list[Running],
        trees: Sequence[DraftTree],
        choice: Choice,
        hidden: HiddenStates,
        starts: Sequence[int],
    ) -> list[list[int]]:
        """Append the sampled tokens to each request, up to the first one after a rejected draft.

        A request's rows in `choice` and `hidden` begin at its entry of `starts`, one per node of
        its tree. Returns for each request the path of nodes after which tokens were sampled.
        """
        tokens = choice.tokens.tolist()
        log_probs = choice.log_probs.tolist()
        sampling_log_probs = choice.sampling_log_probs.tolist()
        paths: list[list[int]] = []
        new = accepted = siblings = 0
        for request, tree, first in zip(requests, trees, starts, strict=False):
            known, path = request.length, list[int]()
            paths.append(path)
            chosen = tokens[first : first + len(tree)]
            for node in accepted_path(tree.tokens, tree.parents, chosen):
                row = first + node
                request.push(
                    tokens[row],
                    log_probs[row],
                    sampling_log_probs[row],
                    self.version,
                    self._decode_text,
                )
                if request.stop_reason is StopReason.ERROR:
                    break
                path.append(node)
                if node:
                    accepted += 1
                    # The index of the node's token: the token just pushed follows it.
                    request.drafted.append(len(request.token_ids) - 2)
                    siblings += not tree.is_first_child(node)
                if request.request.return_hidden_states:
                    request.hidden.append(hidden.at(row))
                if request.stop_reason is not None:
                    break
            new += request.length - known
        self._counters.generated_tokens += new
        self._counters.accepted_tokens += accepted
        self._counters.sibling_tokens += siblings
        return paths

    def _move_accepted(self, paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Move the keys and values of accepted drafts to the slots of their positions."""
        moves = [
            (row, length - 1 + node, length - 1 + depth)
            for row, (path, length) in enumerate(zip(paths, lengths, strict=True))
            for depth, node in enumerate(path)
            if node != depth
        ]
        if moves:
            self._scheduler.store.move_slots(moves)

    def _finish_ended(self, requests: list[Running]) -> None:
        """Free the rows of the requests that have ended, and store their generations."""
        for request in requests:
            if request.stop_reason is not None:
                if request.stop_reason is StopReason.ERROR:
                    self._scheduler.store.clear(self._scheduler.row(request))
                else:
                    self._scheduler.cache_kv(request, self._weights)
                self._scheduler.remove(request)
                self._ended.append(request.generation(self._decode_text))
                self._counters.finished += 1

    def _row_freed(self, request: Running) -> None:
        """Tell the proposer that a request has ended or was preempted."""
        self._sampling = None
        if self._proposer is not None:
            self._proposer.end(request.request_id)
        elif (
            self._backoff_steps
            and self._own_proposer is not None
            and request.stop_reason is not None
        ):
            known = len(request.request.prompt_ids) + len(request.request.prior_ids)
            self._own_proposer.remember(request.request.prompt_ids, request.context, known)


def _first_child_chains(
    trees: Sequence[DraftTree], paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """`StepRecord.straight` of a step: how far chains would have come instead of trees."""
    triples = zip(trees, paths, tokens, strict=True)
    return [tree.straight(path, new) for tree, path, new in triples]


def _without_inference_tensors(generations: list[Generation]) -> list[Generation]:
    """Replace hidden states from inference mode by copies that training can use."""
    for generation in generations:
        if generation.hidden_states is not None:
            generation.hidden_states = generation.hidden_states.clone()
        if generation.context_hidden_states is not None:
            generation.context_hidden_states = generation.context_hidden_states.clone()
    return generations
