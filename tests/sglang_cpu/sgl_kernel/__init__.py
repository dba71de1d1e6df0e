"""Pure-torch stand-in for the CPU build of sgl_kernel (not on PyPI).

sglang 0.5.23 with SGLANG_USE_CPU_ENGINE=1 imports these names at module
level even where no AMX kernel is used.  Plain (non-speculative) decoding
calls only assign_req_to_token_pool_cpu.
"""


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    pos = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False
    ):
        n = end - start
        req_to_token[row, start:end] = out_cache_loc[pos : pos + n].to(req_to_token.dtype)
        pos += n


def _absent(name):
    def fn(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: no CPU kernels in this install")

    fn.__name__ = name
    return fn


for _name in (
    "copy_all_layer_kv_cache_cpu",
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = _absent(_name)
del _name
