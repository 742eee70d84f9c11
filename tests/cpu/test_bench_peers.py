"""What the peers are given: stand-ins with their signatures compute attention or the write from the arguments alone."""

import itertools
import sys
import types
from dataclasses import replace

import pytest
import torch

from bench.attention_inputs import AttentionInputs
from bench.candidate import NotApplicableError
from bench.peers import fa3, flashinfer, flex, sdpa, sglang_triton
from bench.session import Session
from bench.suites.decode import decode_case, uniform
from bench.suites.mixed import SMOKE as MIXED
from bench.suites.prefill import prompts
from bench.suites.write import SUITE as WRITE
from bench.write_inputs import WriteInputs

SESSION = Session(torch.device("cpu"), smoke=True)
SMALL = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32}
CASES = [
    pytest.param(decode_case("ragged", (1, 70, 17), **SMALL), id="decode"),
    pytest.param(uniform(2, 40, layout="interleaved", **SMALL), id="decode-interleaved"),
    pytest.param(prompts("2x5", 2, 5, 30, layout="hnd", **SMALL), id="prefill-hnd"),
    pytest.param(prompts("2x5", 2, 5, 30, **SMALL), id="prefill"),
    pytest.param(replace(MIXED[0], dtype="bfloat16"), id="mixed"),
]


def attend(q, k, v, pages_of, query_starts, seq_lens, out, scale):
    """Causal attention of each sequence over its pages, in f32."""
    heads, block_size = k.shape[2], k.shape[1]
    for row, length in enumerate(seq_lens):
        ids = torch.tensor(pages_of(row), dtype=torch.int64)
        assert len(ids) == -(-length // block_size)
        begin, end = query_starts[row], query_starts[row + 1]
        keys, values = (x[ids].reshape(-1, heads, x.shape[3])[:length].float() for x in (k, v))
        queries = q[begin:end].float().view(end - begin, heads, -1, q.shape[2])
        scores = torch.einsum("rhgd,lhd->rhgl", queries, keys) * scale
        hidden = torch.arange(length) > torch.arange(length - (end - begin), length)[:, None]
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        out[begin:end] = torch.einsum("rhgl,lhd->rhgd", scores.softmax(-1), values).reshape(out[begin:end].shape)


def fake_fa3():
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, softmax_scale, causal, block_table, out,
        scheduler_metadata, fa_version,
    ):  # fmt: skip
        assert causal
        assert fa_version == 3
        assert max_seqlen_k == int(seqused_k.max())
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert {cu_seqlens_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
        lengths = seqused_k.tolist()

        def pages_of(row):
            return block_table[row, : -(-lengths[row] // k.shape[1])].tolist()

        attend(q, k, v, pages_of, cu_seqlens_q.tolist(), lengths, out, softmax_scale)
        return out

    def get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype,
        cu_seqlens_q, page_size, causal,
    ):  # fmt: skip
        assert (batch_size, causal) == (len(cache_seqlens), True)
        return torch.zeros(4, dtype=torch.int32)

    module = types.ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func, module.get_scheduler_metadata = flash_attn_varlen_func, get_scheduler_metadata
    return {"vllm": types.ModuleType("vllm"), "vllm.vllm_flash_attn": module}


class Wrapper:
    """Both of FlashInfer's paged wrappers."""

    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        assert kv_layout == "NHD"
        assert use_tensor_cores or backend in ("fa2", "fa3")

    def run(self, q, paged_kv_cache, *, out):
        k, v = paged_kv_cache
        indptr, last = self.indptr.tolist(), self.last.tolist()
        assert (self.num_qo_heads, self.num_kv_heads) == (q.shape[1], k.shape[2])
        lengths = [(indptr[i + 1] - indptr[i] - 1) * self.page_size + last[i] for i in range(len(last))]

        def pages_of(row):
            return self.indices[indptr[row] : indptr[row + 1]].tolist()

        attend(q, k, v, pages_of, self.starts, lengths, out, self.sm_scale)
        return out


class Decode(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, q_data_type,
        kv_data_type, sm_scale,
    ):  # fmt: skip
        self.indptr, self.indices, self.last = indptr, indices, last_page_len
        self.num_qo_heads, self.num_kv_heads, self.page_size, self.sm_scale = (
            num_qo_heads, num_kv_heads, page_size, sm_scale,
        )  # fmt: skip
        self.starts = list(range(len(indptr)))


class Prefill(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, q_data_type, kv_data_type, sm_scale,
    ):  # fmt: skip
        assert causal
        self.indptr, self.indices, self.last = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.num_qo_heads, self.num_kv_heads, self.page_size, self.sm_scale = (
            num_qo_heads, num_kv_heads, page_size, sm_scale,
        )  # fmt: skip
        self.starts = qo_indptr.tolist()


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    k, v = paged_kv_cache
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist())):
        block = int(kv_indices[int(kv_indptr[row]) + position // k.shape[1]])
        k[block, position % k.shape[1]] = append_key[token]
        v[block, position % k.shape[1]] = append_value[token]


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, sm_scale,
    k_scale, v_scale, logit_cap=0.0, sinks=None, xai_temperature_len=-1,
):  # fmt: skip
    assert max_kv_splits == attn_logits.shape[2] == attn_lse.shape[2] == int(num_kv_splits.max())
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, v_buffer.shape[-1])
    assert (k_scale, v_scale) == (1.0, 1.0)
    extend(q, None, None, o, k_buffer, v_buffer, list(range(len(kv_indptr))), kv_indptr, kv_indices, sm_scale)


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
    is_causal, mask_indptr, max_len_extend, sm_scale=None, logit_cap=0.0, skip_prefix_custom_mask=True,
):  # fmt: skip
    assert (custom_mask, mask_indptr, is_causal) == (None, None, True)
    assert max_len_extend == int(qo_indptr.diff().max())
    starts = qo_indptr.tolist()
    extend(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, starts, kv_indptr, kv_indices, sm_scale)


def extend(q, k_new, v_new, out, k_pool, v_pool, starts, kv_indptr, kv_indices, scale):
    """Each sequence's pool slots and new keys in one dense row of blocks of one token."""
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        slots = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
        k, v = (
            torch.cat([pool[slots], pool[:0] if new is None else new[begin:end]])[:, None]
            for pool, new in ((k_pool, k_new), (v_pool, v_new))
        )
        span = range(len(k))
        attend(q[begin:end], k, v, lambda _, span=span: list(span), [0, end - begin], [len(k)], out[begin:end], scale)


@pytest.fixture
def sglang(monkeypatch):
    folder = "sglang.srt.layers.attention.triton_ops"
    for function in (decode_attention_fwd, extend_attention_fwd):
        name = f"{folder}.{function.__name__.removesuffix('_fwd')}"
        module = types.ModuleType(name)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    parts = folder.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(parts[count - 1]))


@pytest.fixture
def stand_ins(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    module.append_paged_kv_cache = append_paged_kv_cache
    for name, fake in {**fake_fa3(), "flashinfer": module}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(flashinfer, "built", {"fa2:bfloat16:32", "fa3:bfloat16:32", "page"})


def check(inputs, candidates):
    for candidate in candidates:
        if candidate.plan is not None:
            candidate.plan()
        for index in range(min(inputs.sets, candidate.sets or inputs.sets)):
            inputs.poison(index)
            inputs.verify(candidate.run(index), index)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", [pytest.param(fa3, id="fa3"), pytest.param(flashinfer, id="flashinfer")])
def test_attention(stand_ins, peer, case):
    with AttentionInputs(SESSION, case) as inputs:
        candidates = peer.attention(inputs)
        assert len(candidates) == (1 if peer is flashinfer and case.is_decode else 2)
        check(inputs, candidates)


@pytest.mark.parametrize("case", CASES)
def test_sglang(sglang, case):
    with AttentionInputs(SESSION, case) as inputs:
        if case.layout == "hnd":
            with pytest.raises(NotApplicableError, match="HND"):
                sglang_triton.attention(inputs)
            return
        check(inputs, sglang_triton.attention(inputs))


def test_append(stand_ins):
    with WriteInputs(SESSION, WRITE.smoke_cases[0]) as inputs:
        check(inputs, flashinfer.write(inputs))


def test_flashinfer_that_was_not_built_says_so(stand_ins, monkeypatch):
    monkeypatch.setattr(flashinfer, "built", set())
    with AttentionInputs(SESSION, uniform(2, 20, **SMALL)) as inputs:
        (candidate,) = flashinfer.attention(inputs)
        with pytest.raises(RuntimeError, match="fa2:bfloat16:32 was not built"):
            candidate.plan()


@pytest.mark.parametrize("peer", [pytest.param(fa3, id="fa3"), pytest.param(flashinfer, id="flashinfer")])
def test_no_float32(stand_ins, peer):
    with (
        AttentionInputs(SESSION, uniform(2, 20, dtype="float32", **SMALL)) as inputs,
        pytest.raises(NotApplicableError),
    ):
        peer.attention(inputs)


def test_dense_attention(monkeypatch):
    monkeypatch.setitem(sdpa.BACKENDS, "math", torch.nn.attention.SDPBackend.MATH)
    with AttentionInputs(SESSION, prompts("2x40", 2, 40, **SMALL)) as inputs:
        check(inputs, sdpa.attention(inputs, ("math",)))
    with AttentionInputs(SESSION, prompts("2x4-ctx8", 2, 4, 8, **SMALL)) as inputs, pytest.raises(NotApplicableError):
        sdpa.attention(inputs, ("math",))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(prompts("2x256", 2, 256, **SMALL), id="prompt"),
        pytest.param(prompts("1x128-ctx128", 1, 128, 128, **SMALL), id="context"),
        pytest.param(uniform(2, 384, **SMALL), id="decode"),
    ],
)
def test_flex(case):
    with AttentionInputs(SESSION, replace(case, dtype="float32")) as inputs:
        check(inputs, flex.attention(inputs, compiled=False))
