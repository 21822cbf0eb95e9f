"""Names that SGLang imports from its CPU kernels, which no package index has. Each raises if it is ever called."""

NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def _missing(name):
    def call(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in: SGLang's CPU kernels are not installed")

    call.__name__ = name
    return call


for _name in NAMES:
    globals()[_name] = _missing(_name)
