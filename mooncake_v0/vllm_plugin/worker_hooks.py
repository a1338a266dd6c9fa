"""Turns a vLLM worker into a producer or a consumer by wrapping methods of its objects, never of its classes.

`patch_worker_wrapper` wraps the one method that creates workers in every executor. A worker whose VllmConfig has a
kv_transfer_config gets a `WorkerTransfer`; every other one is left alone. Order of a worker's life
(vllm 0.6.4.post1, worker/worker_base.py, worker/cpu_worker.py, worker/worker.py):

    init_worker → load_model → initialize_cache: the cache's shape is known, the agent is started
    each step: prepare_model_input on the driver makes the plan; it travels in the broadcast of the model input;
               the model's forward stores or receives
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
from array import array
from typing import Any, Callable, Iterator, Sequence

import torch

from mooncake_v0.errors import KVLayoutError, MooncakeV0Error
from mooncake_v0.kv.connector import MISSING, Consumer, Producer, StepStore, pack_block_ids
from mooncake_v0.kv.cuda_memory import device_pools
from mooncake_v0.kv.layout import KVLayout, find_block_dim
from mooncake_v0.kv.page_locks import page_locks
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan, content_key, decode_plan, encode_plan
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import CHECKSUMS, TRANSPORTS, AgentSettings
from mooncake_v0.transfer.peer import NO_PEER
from mooncake_v0.vllm_plugin.early_decode import tell_ends
from mooncake_v0.vllm_plugin.environment import choice, seconds
from mooncake_v0.vllm_plugin.fill_ahead import FillAhead, JoinedRows, can_join, count_first_steps
from mooncake_v0.vllm_plugin.fingerprint import adapter_identity, model_fingerprint
from mooncake_v0.vllm_plugin.guided_decoding import provide_airports
from mooncake_v0.vllm_plugin.input_tensors import make_long_tensors_with_numpy, make_sequence_data_of_the_same_numbers
from mooncake_v0.vllm_plugin.kv_transfer_config import KVTransferConfig
from mooncake_v0.vllm_plugin.metrics import WorkerMetrics
from mooncake_v0.vllm_plugin.parking import IDLE_WAIT_S, SERVER_WAIT_S, ParkingLot
from mooncake_v0.vllm_plugin.plugin_logging import set_up_logging
from mooncake_v0.vllm_plugin.wrapping import call_after, wrap_once

logger = logging.getLogger(__name__)

_BROADCAST_KEY = "mooncake_v0_plan"
DEFAULT_WAIT_S = 2.0
_AGENT_START_S = 10.0
_KV_CACHE_ARGUMENT = 3  # of Attention.forward: query, key, value, kv_cache, attn_metadata
_STEP_WAIT_S = 0.25  # for ranks that lag behind the driver's, which was asked before
DEFAULT_TTL_S = 480.0  # as V1's VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT


def patch_worker_wrapper() -> None:
    """Wrap WorkerWrapperBase.init_worker; safe to call again."""
    from vllm.worker.worker_base import WorkerWrapperBase

    wrap_once(WorkerWrapperBase, "init_worker", _with_transfer)


def _with_transfer(original: Callable[..., None]) -> Callable[..., None]:
    def init_worker(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vllm_config = kwargs.get("vllm_config") or (args[0] if args else None)
        if getattr(vllm_config, "kv_transfer_config", None) is not None:
            provide_airports()
            WorkerTransfer(self.worker, vllm_config).install()

    return init_worker


def patch_llm_engine() -> None:
    """Wrap LLMEngine.__init__: where the driver's worker is in the same process, its transfer sees the scheduler."""
    from vllm.engine.llm_engine import LLMEngine

    wrap_once(LLMEngine, "__init__", _with_parking)


def _with_parking(original: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # the worker itself, not its wrapper (executor/gpu_executor.py:25, executor/cpu_executor.py); nothing of ours if it
        # is the proxy of a worker in another process
        transfer = getattr(getattr(self.model_executor, "driver_worker", None), "mooncake_v0", None)
        if isinstance(transfer, WorkerTransfer):
            from vllm.engine.async_llm_engine import _AsyncLLMEngine

            idle_wait_s = SERVER_WAIT_S if isinstance(self, _AsyncLLMEngine) else IDLE_WAIT_S
            for scheduler in self.scheduler:
                transfer.attach_scheduler(scheduler, idle_wait_s)
            count_first_steps(self)

    return initialise


class WorkerTransfer:
    """One worker's transfer: its hooks, its agent, and the plan of the step under way."""

    def __init__(self, worker: Any, vllm_config: Any) -> None:
        set_up_logging()
        self.worker = worker
        self.vllm_config = vllm_config
        self.config: KVTransferConfig = vllm_config.kv_transfer_config
        self.client: AgentClient | None = None
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self._fingerprint = b""
        self._plan: TransferPlan | None = None
        self._attention: list[Any] = []  # the model's attention modules, on prefill
        self._metrics: WorkerMetrics | None = None
        self._joined: JoinedRows | None = None
        self._agree = _group_agreement(vllm_config.parallel_config.tensor_parallel_size)

    def install(self) -> None:
        worker, runner = self.worker, self.worker.model_runner
        worker.mooncake_v0 = self
        make_long_tensors_with_numpy()
        make_sequence_data_of_the_same_numbers()
        wrap_once(worker, "load_model", call_after(self._hook_model))
        wrap_once(worker, "initialize_cache", call_after(self._start))
        runner.prepare_model_input = self._planning(runner.prepare_model_input)
        runner.make_model_input_from_broadcasted_tensor_dict = self._plan_from_broadcast(
            runner.make_model_input_from_broadcasted_tensor_dict
        )

    # --- start --------------------------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        from vllm import envs
        from vllm.attention import Attention

        model = self.worker.model_runner.model
        model.forward = self._forward(model.forward)
        if self.config.is_producer and not envs.VLLM_TORCH_COMPILE_LEVEL:  # a compiled forward leaves hooks out
            self._attention = [module for module in model.modules() if isinstance(module, Attention)]

    @contextlib.contextmanager
    def _layers_tell(self, store: StepStore) -> Iterator[None]:
        """Within it each layer's attention, which writes the layer's blocks (attention/layer.py), tells the store.

        Hooks only for what leaves layer by layer: a module that has one takes a slower way in every step.
        """

        def layer_done(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            cache = args[_KV_CACHE_ARGUMENT] if len(args) > _KV_CACHE_ARGUMENT else kwargs["kv_cache"]
            store.layer_done(cache.data_ptr())

        modules = self._attention if store.follows_layers else []
        handles = [module.register_forward_hook(layer_done, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self) -> None:
        """The cache exists: start the agent. Whatever fails here, the instance serves alone and says why."""
        try:
            self._connect()
        except MooncakeV0Error as error:
            logger.error("no KV transfer: %s", error)

    def _connect(self) -> None:
        assert self.config.mooncake is not None
        runner, model_config = self.worker.model_runner, self.vllm_config.model_config
        backend = runner.attn_backend
        block_dim = find_block_dim(
            lambda blocks: backend.get_kv_cache_shape(blocks, self.vllm_config.cache_config.block_size, 8, 128)
        )
        layout = KVLayout(self.worker.kv_cache[0], block_dim)
        if layout.num_blocks != self.vllm_config.cache_config.num_gpu_blocks:
            raise KVLayoutError(
                f"the KV cache has {layout.num_blocks} rows for {self.vllm_config.cache_config.num_gpu_blocks} blocks"
            )
        fingerprint = model_fingerprint(self.vllm_config, runner.model, layout, backend.get_name())
        self._fingerprint = repr(sorted(fingerprint.items())).encode()
        self.client = AgentClient(
            AgentSettings(
                role=self.config.role,
                rank=self.worker.rank,
                tp_size=self.vllm_config.parallel_config.tensor_parallel_size,
                config=self.config.mooncake,
                fingerprint=fingerprint,
                pool_nbytes=int(self.config.kv_buffer_size),
                ttl_s=seconds("MOONCAKE_V0_TTL_S", DEFAULT_TTL_S),
                secret_file=os.environ.get("MOONCAKE_V0_SECRET_FILE"),
                log_level=logging.getLevelName(logger.getEffectiveLevel()),
                api_url=self.config.api_url,
                transport=choice("MOONCAKE_V0_TRANSPORT", TRANSPORTS),
                checksum=choice("MOONCAKE_V0_CHECKSUM", CHECKSUMS),
            ),
            page_locks(layout.device),
            device_pools(layout.device),
        )
        self._make_connector(self.client, layout, model_config)
        self.client.start()
        self.client.wait_started(_AGENT_START_S)
        atexit.register(self.client.close)

    def _make_connector(self, client: AgentClient, layout: KVLayout, model_config: Any) -> None:
        hidden_size, dtype = _row_size(model_config), model_config.dtype
        metrics = self._metrics = WorkerMetrics()
        client.on_report = metrics.observe
        if self.config.is_producer:
            self.producer = Producer(client, layout, hidden_size=hidden_size, hidden_dtype=dtype, count=metrics.count)
        else:
            self.consumer = Consumer(
                client,
                layout,
                hidden_size=hidden_size,
                hidden_dtype=dtype,
                count=metrics.count,
                wait_s=seconds("MOONCAKE_V0_WAIT_S", DEFAULT_WAIT_S),
                agree=self._agree,
            )
        logger.info(
            "KV transfer as %s: %d bytes of KV a block, buffer of %d bytes in %s memory",
            self.config.kv_role,
            layout.block_bytes,
            client.pool.nbytes,
            "device" if client.pool.on_device else "host",
        )

    def attach_scheduler(self, scheduler: Any, idle_wait_s: float = IDLE_WAIT_S) -> None:
        """On decode hold back requests whose entries are on their way; the step itself then hardly has to wait."""
        if self.client is None or self._metrics is None:
            return
        self._metrics.show_early_decode()
        if self.consumer is None:
            tell_ends(scheduler, self.client.end)
            return
        layout, wait_s = self.consumer.layout, self.consumer.wait_s

        def key_of(group: Any) -> tuple[bytes, int] | None:
            seq_data = group.first_seq.data
            if not self._can_serve(group, seq_data):
                return None
            tokens = seq_data.prompt_token_ids_array
            return self._key(group, tokens), layout.nbytes(self._num_blocks(tokens))

        runner = self.worker.model_runner
        if self._joined is None and can_join(self.vllm_config, runner):
            self._joined = JoinedRows(runner)
        ahead = None if self._joined is None else FillAhead(scheduler, self.consumer, self._joined)
        ParkingLot(scheduler, self.client, key_of=key_of, wait_s=wait_s, idle_wait_s=idle_wait_s, ahead=ahead)
        self.consumer.wait_s, self.consumer.min_rate_bytes_per_s = _STEP_WAIT_S, math.inf

    # --- a step -------------------------------------------------------------------------------------------------------

    def _planning(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_model_input(seq_groups: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            model_input = prepare(seq_groups, *args, **kwargs)
            self._plan = self._make_plan(seq_groups, model_input)
            if self._joined is not None:
                self._joined.place(seq_groups, model_input)
            if self._plan is not None and self.vllm_config.parallel_config.tensor_parallel_size > 1:
                # A frozen dataclass instance; vLLM asks it for its broadcast right after this and never copies it before.
                plan, original = encode_plan(self._plan), model_input.as_broadcastable_tensor_dict
                object.__setattr__(
                    model_input, "as_broadcastable_tensor_dict", lambda: {**original(), _BROADCAST_KEY: plan}
                )
            return model_input

        return prepare_model_input

    def _plan_from_broadcast(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def make_model_input(tensor_dict: dict[str, Any]) -> Any:
            plan = tensor_dict.pop(_BROADCAST_KEY, None)
            self._plan = None if plan is None else decode_plan(plan)
            return make(tensor_dict)

        return make_model_input

    def _make_plan(self, seq_groups: Sequence[Any], model_input: Any) -> TransferPlan | None:
        """The plan of a batch with prompts, or None: decode steps, the profile run, no agent."""
        if self.client is None or not self.client.running or not seq_groups or not seq_groups[0].is_prompt:
            return None
        if self.client.has_no_peer:
            self._count_alone(sum(self._can_transfer(group) for group in seq_groups))
            return None
        prompts, row, index = [], 0, 0
        for group in seq_groups:
            row += sum(model_input.query_lens[index : index + len(group.seq_data)]) if group.is_prompt else 0
            index += len(group.seq_data)
            if self._can_transfer(group):
                prompts.append(self._plan_prompt(group, row - 1))
        return TransferPlan(prompts, row, len(prompts) == len(seq_groups)) if prompts else None

    def _count_alone(self, prompts: int) -> None:
        """Prompts of a batch that are computed without a question, since there is no peer to ask."""
        connector = self.producer or self.consumer
        if prompts and connector is not None and self.client is not None:
            connector.count(f"{'skipped' if self.producer else 'miss'}_{NO_PEER}", prompts)
            connector.tell_counters()

    def _can_transfer(self, group: Any) -> bool:
        """Whether this is the pass that completes a prompt, of a request that KV and one hidden row can serve."""
        if not group.is_prompt or not group.do_sample or not group.block_tables:
            return False
        (seq_data,) = group.seq_data.values()
        return self._can_serve(group, seq_data)

    def _can_serve(self, group: Any, seq_data: Any) -> bool:
        if group.multi_modal_data or seq_data.get_output_len():  # with output: preempted and computed again
            return False
        params = group.sampling_params
        return params is not None and (self.config.is_producer or params.prompt_logprobs is None)

    def _key(self, group: Any, tokens: array[int]) -> bytes:
        adapters = adapter_identity(group.lora_request, group.prompt_adapter_request)
        return content_key(self._fingerprint, adapters, tokens)

    def _num_blocks(self, tokens: array[int]) -> int:
        block_size: int = self.vllm_config.cache_config.block_size
        return -(-len(tokens) // block_size)

    def _plan_prompt(self, group: Any, hidden_row: int) -> PromptPlan:
        ((seq_id, seq_data),) = group.seq_data.items()
        tokens = seq_data.prompt_token_ids_array
        num_blocks = self._num_blocks(tokens)
        cached = len(group.computed_block_nums or ())
        return PromptPlan(
            key=self._key(group, tokens),
            block_ids=pack_block_ids(group.block_tables[seq_id][:num_blocks]),
            first_missing=min(cached, num_blocks),
            hidden_row=hidden_row,
            num_tokens=len(tokens),
        )

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            plan, self._plan = self._plan, None
            if plan is None:
                return original(*args, **kwargs)
            if self.producer is not None:
                return self._forward_and_store(self.producer, plan, original, args, kwargs)
            hidden_states = None
            if self.consumer is not None:
                hidden_states = self.consumer.receive(plan)
            elif not self.config.is_producer and plan.complete:
                self._agree(MISSING)  # this rank has no transfer, and the others wait for its vote
            return original(*args, **kwargs) if hidden_states is None else hidden_states

        return forward

    def _forward_and_store(
        self, producer: Producer, plan: TransferPlan, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with producer.client.step():
            store = producer.reserve(plan)
            try:
                with self._layers_tell(store):
                    hidden_states = original(*args, **kwargs)
            except BaseException:
                store.abort()
                raise
            if hidden_states.shape[1:] == (producer.hidden_size,) and hidden_states.dtype == producer.hidden_dtype:
                store.finish(hidden_states)
            else:
                self._refuse_output(producer, store, hidden_states)
        return hidden_states

    def _refuse_output(self, producer: Producer, store: StepStore, output: torch.Tensor) -> None:
        """The model returns something else than one row of the expected size for each token: it computes alone."""
        store.abort()
        producer.count("skipped_model_output", len(store.prompts))
        self.producer = None
        logger.error(
            "no KV transfer: the model returns %s of %s, not rows of %d %s",
            tuple(output.shape),
            output.dtype,
            producer.hidden_size,
            producer.hidden_dtype,
        )


def _row_size(model_config: Any) -> int:
    """Width of what the model's forward returns; OPT may project it down from its hidden size (models/opt.py)."""
    projected = getattr(model_config.hf_text_config, "word_embed_proj_dim", None)
    return int(projected or model_config.get_hidden_size())


def _group_agreement(tp_size: int) -> Callable[[int], int]:
    """The least of the ranks' values: one small all-reduce on the CPU group per batch with prompts."""
    if tp_size == 1:
        return lambda value: value

    def agree(value: int) -> int:
        from vllm.distributed.parallel_state import get_tp_group

        vote = torch.tensor([int(value)])
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return int(vote.item())

    return agree
