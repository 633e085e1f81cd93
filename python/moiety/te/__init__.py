"""The names of Transformer Engine that MoE code uses, over moiety.nn and moiety.quant.

    import moiety.te as te                 # for: import transformer_engine.pytorch as te
    from moiety.te import quantize_master_weights, post_all_gather_processing, replace_raw_data

Arguments have the same names and mean the same. What has no counterpart is an error that names ours.
Parameters are plain ones, quantized weights are moiety.quant.QTensor.
"""

from .. import errors
from . import ops
from .linear import GroupedLinear
from .weights import (cast_master_weights_to_fp8, cast_master_weights_to_nvfp4,
                      post_all_gather_processing, quantize_master_weights, replace_raw_data)

__all__ = ["GroupedLinear", "cast_master_weights_to_fp8", "cast_master_weights_to_nvfp4", "ops",
           "post_all_gather_processing", "quantize_master_weights", "replace_raw_data"]

_OURS = {
    "autocast": "moiety.nn.GroupedLinear(recipe=) quantizes; moiety.quant.quantize makes quantized tensors",
    "checkpoint": "torch.utils.checkpoint.checkpoint runs over every module",
    "fp8_autocast": "moiety.nn.GroupedLinear(recipe=) quantizes; moiety.quant.quantize makes quantized tensors",
    "fp8_model_init": "moiety.quant.PartialCast keeps quantized weights beside their masters",
    "quantized_model_init": "moiety.quant.PartialCast keeps quantized weights beside their masters",
    "DotProductAttention": "torch.nn.functional.scaled_dot_product_attention",
    "LayerNorm": "torch.nn.LayerNorm",
    "LayerNormLinear": "torch.nn.LayerNorm, then torch.nn.Linear",
    "LayerNormMLP": "torch.nn.LayerNorm, then linears of torch",
    "Linear": "torch.nn.Linear",
    "RMSNorm": "torch.nn.RMSNorm",
    "TransformerLayer": "a layer of transformers, whose experts moiety.hf runs",
    "moe_permute": "moiety.ops.expert_rows orders rows by expert, and grouped_mlp reads them in place",
    "moe_permute_with_probs": "moiety.ops.expert_rows orders rows and probabilities by expert",
    "moe_sort_chunks_by_index": "moiety.ops.expert_rows orders rows by expert",
    "moe_unpermute": "moiety.ops.grouped_mlp(..., row_tk=) sums the rows of a token",
    "fused_topk_with_score_function": "moiety.ops.router",
    "fused_compute_score_for_moe_aux_loss": "moiety.nn.MoELayer returns aux_loss",
    "fused_moe_aux_loss": "moiety.nn.MoELayer returns aux_loss",
    "ep_combine": "several ranks are not supported yet",
    "ep_dispatch": "several ranks are not supported yet",
}


def __getattr__(name: str) -> None:
    if name in _OURS:
        raise errors.Unsupported(f"moiety.te.{name} does not exist: {_OURS[name]}")
    raise AttributeError(f"module 'moiety.te' has no attribute '{name}'")
