"""The models: Megatron's transformer block between an embedding and a head.

A stage's forward pass goes from token ids (or the previous stage's output) to hidden states; the
last stage makes scores of its own. What must hold: they are those of the Hugging Face model of the
same configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from leeway.config import TrainerConfig
from leeway.errors import ConfigError
from trainer_service.backends.layout import Layout, ModelShape
from trainer_service.backends.megatron.gradients import gather_tokens, look_up
from trainer_service.backends.megatron.names import VALUE_BIAS, VALUE_WEIGHT, Heads
from trainer_service.backends.packed_attention import attend
from trainer_service.backends.token_scores import token_scores
from trainer_service.packed import Segment

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3")
"""Those whose angles depend on the position alone."""


class StageModel(LanguageModule):
    """One pipeline stage of a model without its head. Attributes that Megatron's schedules and
    gradient sums read have its names: pre_process, post_process,
    share_embeddings_and_output_weights, model_type."""

    def __init__(
        self, config: TransformerConfig, hf: PretrainedConfig, *, tied: bool = False
    ) -> None:
        """
        Args:
            tied: The head's weight is the embedding's.
        """
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.share_embeddings_and_output_weights = tied
        self.rotary = _rotary(hf).to(torch.cuda.current_device())
        if self.pre_process:
            self.embedding = Embedding(config, hf.vocab_size)
        layers = get_num_layers_to_build(config, pp_rank=self.pp_group.rank())
        self.decoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules([_layer_spec(config)] * layers, layer_norm=_norm()),
            pre_process=self.pre_process,
            post_process=self.post_process,
        )

    @property
    def first_layer(self) -> int:
        """Index in the whole model."""
        return int(self.decoder.layers[0].layer_number) - 1

    @staticmethod
    def new_tensors(hf: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face names and shapes of what a model directory may lack, and is 0 then."""
        return {}

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """The previous stage's output; the schedule calls it before each forward pass."""
        self.decoder.set_input_tensor(tensors[0])

    def forward(self, token_ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Hidden states, float [s, 1, hidden]; cut over tensor-parallel ranks along s.

        Args:
            token_ids, positions: int64 [1, s], this context-parallel rank's.
            segments: int64 [k, 4] of the whole row, on a CPU: start, length, parent, own or not.
        """
        hidden = self.embedding(token_ids) if self.pre_process else None
        angles = self.rotary.inv_freq * positions[0, :, None].float()
        out: Tensor = self.decoder(
            hidden_states=hidden,
            # The block hands it through to the core attention.
            attention_mask=segments,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None],
        )
        return out

    def score(
        self,
        hidden: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        predictions: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Scores and entropies, float32 [n], on the last stage; on its tensor-parallel ranks alike.

        Args:
            hidden: What `forward` gave.
            rows: int64 [r], the positions in s that predict something.
            temperatures: float32 [r].
            predictions: int64 [n], which of the r rows predicts each target.
            targets: int64 [n].
        """
        raise NotImplementedError


class PolicyModel(StageModel):
    """Its scores are log-probabilities."""

    def __init__(self, config: TransformerConfig, hf: PretrainedConfig) -> None:
        tied = bool(hf.tie_word_embeddings)
        super().__init__(config, hf, tied=tied)
        if self.post_process and not (self.pre_process and tied):
            self.head = Head(config, hf.vocab_size)
        if tied and self.pre_process != self.post_process:
            # Two copies: Megatron adds their gradients up, and gives each a bucket of its own.
            weight: Any = self.shared_embedding_or_output_weight()
            weight.shared_embedding = True

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        """The embedding's weight on the first stage, the head's on the last."""
        owner = self.embedding if self.pre_process else self.head
        weight: nn.Parameter = owner.weight
        return weight

    def score(
        self,
        hidden: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        predictions: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        head = self.head if hasattr(self, "head") else self.embedding
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return token_scores(hidden[rows, 0], head.weight, temperatures, predictions, targets)
        # Backwards, what each rank's part of the vocabulary owes is summed and cut again.
        whole = gather_from_sequence_parallel_region(hidden)[rows, 0]
        return token_scores(whole, head.weight, temperatures, predictions, targets, group)


class ValueModel(StageModel):
    """A critic. Its scores are values of the states before each target, its entropies 0."""

    def __init__(self, config: TransformerConfig, hf: PretrainedConfig) -> None:
        super().__init__(config, hf)
        if self.post_process:
            self.value = ValueHead(config)

    @staticmethod
    def new_tensors(hf: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
        return {VALUE_WEIGHT: (1, int(hf.hidden_size)), VALUE_BIAS: (1,)}

    def score(
        self,
        hidden: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        predictions: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        values: Tensor = self.value(hidden)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # All ranks go on with all values alike: each takes its own back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        own = values[rows, 0, 0].float()[predictions]
        return own, torch.zeros_like(own)


class ValueHead(nn.Linear):
    """From each hidden state to one number. The same on all tensor-parallel ranks, each of which
    has a part of the sequence: their gradients are summed."""

    def __init__(self, config: TransformerConfig) -> None:
        device = torch.cuda.current_device()
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype, device=device)
        for parameter in self.parameters():
            marked: Any = parameter
            marked.sequence_parallel = config.sequence_parallel


class Head(nn.Module):
    """This rank's rows of the output weight, or of the embedding."""

    def __init__(self, config: TransformerConfig, vocabulary: int) -> None:
        super().__init__()
        rows = vocabulary // config.tensor_model_parallel_size
        shape, device = (rows, config.hidden_size), torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


class Embedding(Head):
    """Of token ids, cut along the sequence over tensor-parallel ranks."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [1, s] -> float [s / tp, 1, hidden]."""
        group = parallel_state.get_tensor_model_parallel_group()
        rows = token_ids.T - group.rank() * self.weight.shape[0]
        ours = (rows >= 0) & (rows < self.weight.shape[0])
        hidden: Tensor = look_up(self.weight, rows.where(ours, 0)) * ours.unsqueeze(2)
        if group.size() == 1:
            return hidden
        cut: Tensor = reduce_scatter_to_sequence_parallel_region(hidden)
        return cut


class PackedAttention(MegatronModule):
    """Core attention over packed segments. With context parallelism keys and values come together
    from all ranks."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self._group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
    ) -> Tensor:
        """
        Args:
            query: float [s, 1, heads, d].
            key, value: float [s, 1, key heads, d].
            attention_mask: The segments, as `StageModel.forward` has them.

        Returns:
            float [s, 1, heads * d].
        """
        rows = attention_mask.tolist()
        segments = [Segment(*row[:3]) for row in rows]
        if self._group.size() > 1:
            key, value = (self._in_order(t) for t in (key, value))
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = attend(
            query,
            key,
            value,
            segments,
            [index for index, row in enumerate(rows) if row[3]],
            None,
        )
        return out.transpose(0, 1).flatten(2)

    def _in_order(self, own: Tensor) -> Tensor:
        """All ranks' tokens: each holds a chunk from the front and its mirror image."""
        chunks = gather_tokens(own, self._group).chunk(2 * self._group.size())
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


class RMSNorm(nn.RMSNorm):
    """torch's, whose gradients are summed over tensor-parallel ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(
            hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def shape_of(hf: PretrainedConfig) -> ModelShape:
    """
    Raises:
        ConfigError: The model is of no family that is mapped, or has something that is not.
    """
    if hf.model_type not in FAMILIES:
        raise ConfigError(
            f"trainer.backend = megatron: model_type = {hf.model_type!r} is not mapped, only "
            f"{', '.join(FAMILIES)}; use trainer.backend=torch"
        )
    unusual = {
        "attention_bias": hf.model_type != "qwen2" and getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "use_sliding_window": getattr(hf, "use_sliding_window", False),
        "hidden_act": hf.hidden_act != "silu",
        "mlp_only_layers": bool(getattr(hf, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(hf, "decoder_sparse_step", 1) != 1,
        "rope_parameters": hf.rope_parameters["rope_type"] not in ROPE_TYPES,
    }
    for field, found in unusual.items():
        if found:
            raise ConfigError(
                f"trainer.backend = megatron: the model's {field} = {getattr(hf, field)!r} is not "
                "supported; use trainer.backend=torch"
            )
    moe = hf.model_type == "qwen3_moe"
    return ModelShape(
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        key_value_heads=hf.num_key_value_heads,
        # Experts are not cut.
        intermediate=0 if moe else hf.intermediate_size,
        vocabulary=hf.vocab_size,
        experts=hf.num_experts if moe else 0,
    )


def _rotary(hf: Any) -> LlamaRotaryEmbedding:
    """Every family's frequencies, with all ways to stretch them."""
    return LlamaRotaryEmbedding(hf)


def heads_of(hf: Any) -> Heads:
    width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return Heads(hf.num_attention_heads, hf.num_key_value_heads, width)


def transformer_config(
    hf: PretrainedConfig, layout: Layout, config: TrainerConfig, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's description of the same model. Sequence parallel wherever tensor parallel."""
    gpu = torch.cuda.is_available()
    experts: dict[str, Any] = {}
    if hf.model_type == "qwen3_moe":
        experts = {
            "num_moe_experts": hf.num_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32" if dtype is not torch.float32 else None,
        }
    recompute: dict[str, Any] = {}
    if config.activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=heads_of(hf).width,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        # Micro-batches differ in length; Megatron wants the dispatcher named even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Losses of micro-batches and ranks add up: nothing is to be averaged.
        calculate_per_token_loss=True,
        # Weights come from files.
        perform_initialization=False,
        use_cpu_initialization=not gpu,
        gradient_accumulation_fusion=not gpu or transformer_engine(),
        # Fused kernels are CUDA's; what needs Apex stays off.
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
        **recompute,
    )


def transformer_engine() -> bool:
    """Its layers are used wherever it can be imported on a GPU."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def _norm() -> type[nn.Module]:
    if transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm: type[nn.Module] = TENorm
        return norm
    return RMSNorm


def _layer_spec(config: TransformerConfig) -> Any:
    if transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec
