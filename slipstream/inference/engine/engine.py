"""The synchronous core: add requests, step, collect what ended.

One thread calls it. It knows nothing about event loops, prompts as text, rewards or training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from math import gcd

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.inference.engine.batch_sampling import BatchSampling, sampling_rows
from slipstream.inference.engine.counters import Counters
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.memory import FreedMemory
from slipstream.inference.engine.prefill import Prefill
from slipstream.inference.engine.prefix_cache import BLOCK, PrefixCache
from slipstream.inference.engine.request import Decode, Running
from slipstream.inference.engine.runner import Runner
from slipstream.inference.engine.scheduler import Admission, Scheduler
from slipstream.inference.engine.settings import EngineSettings
from slipstream.inference.engine.verification import verification
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
    HasMinAcceptance,
    ListsChoices,
    StepRecord,
    StrategySelector,
)
from slipstream.kernels.team import single_threaded
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
    """Continuous batching over one policy."""

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
        """`decode` turns ids into text: needed for stop strings and for `Generation.text`.

        `proposer` drafts after the plans of `selector` or, without one, after `plan`, which may be
        changed between steps. Hidden states also hold the inputs of the layers `aux_layers`; layers
        that a proposer asks for need not be named.

        Raises ConfigError for a model whose widths exact mode does not cover, for a plan or
        selector without a proposer, and for other auxiliary layers than the proposer's.
        """
        wanted = aux_layers_of(proposer)
        if aux_layers and wanted and aux_layers != wanted:
            raise ConfigError(
                f"engine: aux_layers={list(aux_layers)}, but the proposer needs {list(wanted)}; "
                "leave them out"
            )
        aux_layers = wanted or aux_layers
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
            self._store(self._runner.row_multiple, lambda size: self._scheduler.make_way(size)),
            max_num_seqs=settings.max_num_seqs,
            max_prefill_tokens=settings.max_prefill_tokens,
            left=self._left,
            prefixes=PrefixCache() if settings.prefix_caching else None,
            stagger=settings.stagger_samples,
        )
        self._prefill = Prefill(
            self._runner,
            self._scheduler,
            max_tokens=settings.max_prefill_tokens,
            new_row=self._store,
        )
        self._own_proposer, self._own_selector = proposer, selector
        self._judge: HasMinAcceptance | None = (
            selector if isinstance(selector, HasMinAcceptance) else None
        )
        # None while it is not to speculate, the proposer also while it is not to see what runs.
        self._proposer, self._selector = proposer, selector
        # How many more steps it is not to see; whether no request has begun since none was left.
        self._unseen, self._idle = 0, True
        if selector is not None and proposer is None:
            raise ConfigError("engine: a selector of draft plans needs a proposer")
        self.plan = plan
        # Whether the next drafts also have to catch up: a step that did not draft, a new request.
        self._behind = True
        # Of the running batch; None where it has changed.
        self._sampling: BatchSampling | None = None
        self._ended: list[Generation] = []
        self._freed = FreedMemory()
        self.lent: Callable[[bool], None] = lambda free: None
        """Told when decoding goes on with one thread, and when no longer: see `EngineSettings`."""
        self._lends = False
        # Versions may repeat (a resumed run publishes its first one again); loads do not.
        self._weights = 0
        self._counters = Counters()

    @property
    def plan(self) -> DraftPlan:
        """How much is drafted. May be set between steps."""
        return self._plan

    @plan.setter
    def plan(self, plan: DraftPlan) -> None:
        if plan != OFF and self._own_proposer is None:
            raise ConfigError(f"engine: draft plan {plan} needs a proposer")
        self._plan = plan

    def speculate(self, on: bool) -> None:
        """Draft, or decode plainly until told otherwise: the same tokens, in another time.

        Raises EngineError where there are requests, for who drafts must see them from their
        beginning, and where nobody drafts.
        """
        if self._own_proposer is None:
            raise EngineError("speculate: this engine was made without a proposer of drafts")
        if not self._scheduler.idle:
            raise EngineError("speculate: requests are running; let them end, or abort them")
        self._proposer = self._own_proposer if on else None
        self._selector = self._own_selector if on else None
        self._unseen = 0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it can never be served."""
        config = self._runner.config
        limit = min(self.settings.max_model_len, config.context_limit.tokens)
        check_request(request, vocab_size=config.vocab_size, max_model_len=limit)
        name = request.request_id
        if self._scheduler.knows(name):
            raise RequestError(f"request {name!r}: a request of this id is already running")
        if request.params.stop and self._decode_text is None:
            raise RequestError(f"request {name!r}: stop strings need an engine with a tokenizer")
        context = [*request.prompt_ids, *request.prior_ids]
        if not self._scheduler.store.fits(1, len(context) + request.params.max_tokens):
            raise RequestError(
                f"request {name!r}: {len(context)} + {request.params.max_tokens} tokens do not fit "
                f"the KV budget of {self.settings.kv_budget_bytes} bytes; shorten the prompt, "
                "lower max_tokens or raise actor_rollout_ref.rollout.kv_cache_bytes"
            )
        self._scheduler.add(
            Running(
                request=request,
                key=key_words(astuple(request.key)),
                eos_ids=frozenset(config.eos_token_ids),
                context=context,
            )
        )

    def step(self) -> list[Generation]:
        """Admit what fits, decode at least one token for everyone, return what ended."""
        with torch.inference_mode():
            # Back before a prefill, which takes all of them.
            self._lend()
            self._admit()
            self._lend()
            with single_threaded(self._lends):
                self._decode()
            self._when_idle()
        ended, self._ended = self._ended, []
        return _ordinary(ended)

    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._ended)

    def run(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all of `requests` and return results in their order (no other work)."""
        for request in requests:
            self.add(request)
        done: dict[str, Generation] = {}
        while self.has_work():
            done.update((g.request_id, g) for g in self.step())
        return [done[r.request_id] for r in requests]

    def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Stop requests (all when None); partial tokens are kept. Unknown ids are ignored."""
        wanted = None if request_ids is None else set(request_ids)
        stopped = [r for r in self._scheduler.all() if wanted is None or r.request_id in wanted]
        with torch.inference_mode():
            # From the last row to the first, so that few rows move.
            for request in reversed(stopped):
                request.stop_reason = StopReason.ABORT
                self._scheduler.keep(request, self._weights)
                self._scheduler.remove(request)
            self._when_idle()
        self._counters.aborted += len(stopped)
        return _ordinary([request.generation(self._decode_text) for request in stopped])

    def interrupt(self, wanted: bool) -> None:
        """Steps are short: whoever wants something waits for the slice of them under way."""

    @torch.inference_mode()
    def preempt(self, request_ids: Sequence[str]) -> None:
        """Send running requests back to the queue, as a lack of memory would."""
        for request in [r for r in self._scheduler.running if r.request_id in set(request_ids)]:
            self._scheduler.preempt(request, self._weights)
            self._counters.preempted += 1

    @torch.inference_mode()
    def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights between two steps; see `KVPolicy` for running requests.

        A context that is being prefilled in pieces begins anew: all of it under the new weights.
        Raises EngineError, and changes nothing, when the update does not fit the model; with one
        copy of the weights some of them are new by then.
        """
        tensors = {} if self.settings.one_copy else self._runner.check(update)
        self._scheduler.drop_heads()
        if update.kv_policy is KVPolicy.RECOMPUTE:
            self._scheduler.forget_kv()
        else:
            self._set_aside_preempted()
        if self.settings.one_copy:
            self._runner.take(update)
        else:
            self._runner.load(tensors)
        self._weights += 1
        self.version = update.version
        if self._own_selector is not None:
            self._own_selector.changed()

    def _lend(self) -> None:
        """Leave all cores but one to others while few requests run, and take them back."""
        running = len(self._scheduler.running)
        few = 0 < running <= self.settings.one_thread_below and not self._scheduler.waiting
        if few != self._lends:
            self._lends = few
            self.lent(few)

    def _when_idle(self) -> None:
        """Give memory back when nobody runs or waits; the next request begins a rollout then."""
        self._idle = self._scheduler.idle
        if self._idle:
            self._lend()
        if self._idle and self.settings.free_cache_engine:
            self._runner.forget_recordings()
            self._scheduler.store.release()
            self._freed.give_back()

    def _set_aside_preempted(self) -> None:
        """Compute the keys and values of preempted requests while their weights are still here."""
        for request in self._scheduler.unsaved():
            self._scheduler.set_aside(request, self._prefill.apart(request))

    def update_drafter(self, update: WeightUpdate) -> None:
        """Take new draft weights between two steps.

        Raises EngineError, and changes nothing, where there is no drafter that learns, or when the
        update does not fit it.
        """
        if update.kind is not UpdateKind.DRAFT:
            raise EngineError(f"the drafter takes draft weights, got {update.kind.value}")
        if not isinstance(self._own_proposer, LearningProposer):
            raise EngineError(f"this engine has no draft head to update to {update.version}")
        self._own_proposer.update(update)
        if self._own_selector is not None:
            self._own_selector.changed(drafter=True)

    def stats(self) -> EngineStats:
        return self._counters.stats(
            version=self.version,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_bytes=self._scheduler.kv_bytes,
        )

    def _store(
        self, row_multiple: int = 1, before_growth: Callable[[int], None] | None = None
    ) -> KVStore:
        return KVStore(
            self._runner.config,
            self._runner.dtype,
            self._runner.device,
            self.settings.kv_budget_bytes,
            row_multiple=row_multiple,
            before_growth=before_growth,
        )

    def _admit(self) -> None:
        """Prefill waiting requests and sample their next token; of a long context, one piece."""
        if self._idle and self._selector is not None and self._scheduler.waiting:
            requests = min(len(self._scheduler.waiting), self.settings.max_num_seqs)
            self._unseen = self._selector.begin_rollout(requests)
            self._proposer = None if self._unseen else self._own_proposer
        while self._scheduler.waiting:
            before = len(self._scheduler.running)
            admission = self._scheduler.admit(self._weights)
            started = time.perf_counter()
            if admission.long is not None:
                self._counters.prompt_tokens += self._prefill.piece(admission.long, self._weights)
            elif admission.fresh or admission.restored:
                self._sampling = None
                self._begin(admission, self._scheduler.running[before:])
            self._counters.prefill_seconds += time.perf_counter() - started
            if not admission.fresh and not admission.restored:
                return

    def _begin(self, admission: Admission, admitted: list[Running]) -> None:
        """Let requests that have just taken a row begin: fresh ones with a token."""
        states: Mapping[str, Tensor] = {}
        fresh = admission.fresh
        if fresh:
            done = self._prefill.together(admission)
            states, hidden = done.states, done.last.final
            positions = torch.tensor([r.length for r in fresh], device=hidden.device)
            choice = self._runner.choose(hidden, positions, sampling_rows(fresh, hidden.device))
            for request in fresh:
                request.kv_weights = {self._weights}
                drafts = self._proposer is not None and len(request.request.prompt_ids) >= BLOCK
                if drafts or request.wants_context:
                    request.keep_features(states[request.request_id], for_drafts=drafts)
            self._counters.prompt_tokens += done.computed
            self._counters.shared_prompt_tokens += done.shared
            self._counters.reused_prompt_tokens += done.reused
            trees = [DraftTree.chain(r.context[-1], ()) for r in fresh]
            self._accept(fresh, trees, choice, done.last, range(len(fresh)))
        self._begin_drafts(admitted, states)
        self._collect(admitted)

    def _begin_drafts(self, admitted: list[Running], states: Mapping[str, Tensor]) -> None:
        self._behind = True
        if self._proposer is not None:
            for request in admitted:
                name, prompt = request.request_id, request.request.prompt_ids
                known = states.get(name)
                features = None if known is None else self._runner.split(known).features
                self._proposer.begin(name, prompt, request.context, features)

    def _decode(self) -> None:
        """At least one token for every running request."""
        preempted = self._scheduler.make_room(self._weights)
        running = list(self._scheduler.running)
        if not running:
            return
        started = time.perf_counter()
        device, count = self._runner.device, len(running)
        if self._sampling is None:
            self._sampling = BatchSampling(running, device)
        sampling = self._sampling
        lengths = [request.length for request in running]
        positions_N = torch.from_numpy(np.array(lengths)).to(device)
        plan = self._affordable_plan(count, max(lengths))
        trees = self._draft(running, plan, positions_N)
        proposed = time.perf_counter() - started
        # Rows of padding until the tokens of all rows come in fours: one row of four needs none.
        multiple = self._runner.tokens_multiple
        multiple //= gcd(max(map(len, trees)), multiple)
        step = verification(
            trees, lengths, device, row_by_row=self._runner.row_by_row, multiple=multiple
        )
        hidden = self._runner.decode(self._scheduler.store, step)
        choice = self._runner.choose(hidden.final, step.next_positions, step.sampling(sampling))
        for request in running:
            request.kv_weights.add(self._weights)
        paths = self._accept(running, trees, choice, hidden, step.starts)
        tokens = [request.context[known:] for request, known in zip(running, lengths, strict=True)]
        self._straighten(paths, lengths)
        if self._proposer is not None:
            observing = time.perf_counter()
            features = step.along(hidden.features, paths)
            self._proposer.observe(sampling.names, tokens, features)
            proposed += time.perf_counter() - observing
        self._collect(running)
        self._counters.preempted += len(preempted)
        self._account(plan, trees, paths, tokens, time.perf_counter() - started, proposed)
        if self._unseen:
            self._counters.recess_steps += 1
            self._unseen -= 1
            if not self._unseen:
                self._proposer = self._own_proposer
                self._begin_drafts(self._scheduler.running, {})

    def _account(
        self,
        plan: DraftPlan,
        trees: Sequence[DraftTree],
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        seconds: float,
        proposed: float,
    ) -> None:
        """Count a decode step that took `seconds`, `proposed` of them for its drafts, and tell the
        selector of it."""
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
                steady=plan == OFF or not self._behind,
                straight=_straight(trees, paths) if drafts and plan.topk > 1 else (),
            )
            self._selector.record(step)
        self._behind = drafts == 0

    def _affordable_plan(self, rows: int, length: int) -> DraftPlan:
        """The plan, with room for its drafts, or OFF: nobody loses its row to drafts."""
        if self._proposer is None:
            return OFF
        plan = self._plan if self._selector is None else self._selector.select(rows)
        if plan == OFF:
            return OFF
        longest = length + plan.most_drafts(rows)
        if not self._scheduler.store.fits(rows, longest):
            return OFF
        self._scheduler.store.reserve(rows, longest)
        return plan

    def _draft(
        self,
        running: list[Running],
        plan: DraftPlan,
        positions_N: Tensor,
    ) -> list[DraftTree]:
        """What to verify: for each request its last token and the drafts after it."""
        last = [request.context[-1] for request in running]
        if plan == OFF or self._proposer is None or self._sampling is None:
            return [DraftTree.chain(token, ()) for token in last]
        least = 0.0
        if self._judge is not None and self._selector is not None:
            least = self._judge.min_acceptance(len(running))
        batch = DraftBatch(
            request_ids=self._sampling.names,
            last=last,
            positions_N=positions_N,
            rows=self._sampling.rows,
            policy=self._runner.packed,
            min_acceptance=least,
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
        """Hand each request its tokens, as far as its drafts are what the policy chose; the rows of
        its tree begin at its entry of `starts`. Returns the nodes that they were chosen after."""
        tokens = choice.tokens.tolist()
        full, law = choice.log_probs.tolist(), choice.sampling_log_probs.tolist()
        paths: list[list[int]] = []
        new = accepted = siblings = 0
        for request, tree, first in zip(requests, trees, starts, strict=False):
            known, path = request.length, list[int]()
            paths.append(path)
            chosen = tokens[first : first + len(tree)]
            for node in accepted_path(tree.tokens, tree.parents, chosen):
                row = first + node
                request.push(tokens[row], full[row], law[row], self.version, self._decode_text)
                if request.stop_reason is StopReason.ERROR:
                    break
                path.append(node)
                if node:
                    accepted += 1
                    # The node's own token; the one just pushed was chosen after it.
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

    def _straighten(self, paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Move the keys and values of accepted drafts to the slots of their positions."""
        moves = [
            (row, length - 1 + node, length - 1 + depth)
            for row, (path, length) in enumerate(zip(paths, lengths, strict=True))
            for depth, node in enumerate(path)
            if node != depth
        ]
        if moves:
            self._scheduler.store.move_slots(moves)

    def _collect(self, requests: list[Running]) -> None:
        """Free the rows of those that have ended."""
        for request in requests:
            if request.stop_reason is not None:
                if request.stop_reason is StopReason.ERROR:
                    self._scheduler.store.clear(self._scheduler.row(request))
                else:
                    self._scheduler.keep(request, self._weights)
                self._scheduler.remove(request)
                self._ended.append(request.generation(self._decode_text))
                self._counters.finished += 1

    def _left(self, request: Running) -> None:
        """A request has given up its row."""
        self._sampling = None
        if self._proposer is not None:
            self._proposer.end(request.request_id)
        elif self._unseen and self._own_proposer is not None and request.stop_reason is not None:
            known = len(request.request.prompt_ids) + len(request.request.prior_ids)
            self._own_proposer.remember(request.request.prompt_ids, request.context, known)


def _straight(trees: Sequence[DraftTree], paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [tree.straight(path) for tree, path in zip(trees, paths, strict=True)]


def _ordinary(generations: list[Generation]) -> list[Generation]:
    """Hidden states that were made in inference mode, as tensors that a drafter can train on."""
    for generation in generations:
        if generation.hidden_states is not None:
            generation.hidden_states = generation.hidden_states.clone()
        if generation.context_hidden_states is not None:
            generation.context_hidden_states = generation.context_hidden_states.clone()
    return generations
