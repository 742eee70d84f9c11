"""From dot products to scores in units of log2: scale, soft cap, linear biases, and which keys a query sees."""

import triton
import triton.language as tl

# Stands for minus infinity in a running maximum: exp2(-inf - LOWEST) is 0 where exp2(-inf - -inf) would be NaN. A power
# of two, so that its product with anything is exact.
LOWEST: tl.constexpr = tl.constexpr(-(2.0**99))
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(dots, scale_log2, SOFTCAP_LOG2: tl.constexpr):
    """`dots` in units of log2. With a soft cap the scale holds 2 / cap as well, and tanh cannot overflow."""
    scores = dots * scale_log2
    if SOFTCAP_LOG2 > 0:  # cap * tanh(x) = cap * (1 - 2 / (exp(2 x) + 1)), right for exp(2 x) = 0 and infinity too
        scores = SOFTCAP_LOG2 - 2 * SOFTCAP_LOG2 / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def load_slopes(alibi_slopes_ptr, head, in_group):
    """ALiBi's slope of each row, in units of log2 a token."""
    return tl.load(alibi_slopes_ptr + head, mask=in_group, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def biased(scores, slope, key_offset, query_offset):
    """ALiBi: scores [ROWS, KEYS] plus slope [ROWS] * (key position [KEYS] - query position [ROWS])."""
    return scores + slope[:, None] * (key_offset[None, :] - query_offset[:, None]).to(tl.float32)


@triton.jit
def tree_positions(words, context, length):
    """Where each row stands by its depth: context + the bits that are set in its word [ROWS] - 1.

    Bits past the sequence's query tokens, length - context of them, are not counted.
    """
    num_queries = tl.maximum(length - context, 0)
    first = tl.full([], 1, tl.int64)
    present = tl.where(num_queries < 64, (first << tl.minimum(num_queries, 63).to(tl.int64)) - 1, -1)
    count = words & present
    count = count - ((count >> 1) & 0x5555555555555555)
    count = (count & 0x3333333333333333) + ((count >> 2) & 0x3333333333333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F0F0F0F0F
    count = (count * 0x0101010101010101) >> 56
    return context + tl.maximum(count.to(tl.int32) - 1, 0)


@triton.jit
def seen_in_tree(words, ordinal):
    """Whether rows see keys, [ROWS, KEYS]: by the bits of their words [ROWS], or because keys are of the context.

    `ordinal` [KEYS] is a key's place among its sequence's query tokens, negative before them.
    """
    BITS: tl.constexpr = words.dtype.primitive_bitwidth
    place = tl.minimum(tl.maximum(ordinal, 0), BITS - 1).to(words.dtype)
    return (ordinal < 0)[None, :] | (((words[:, None] >> place[None, :]) & 1) != 0)


@triton.jit
def with_sink(highest, denominator, sinks_ptr, head, in_group):
    """The softmax denominator with each head's sink in it, relative to `highest` (log2). Empty rows stay empty.

    Returns (the new highest, the factor for what was summed so far, the new denominator).
    """
    sink = tl.load(sinks_ptr + head, mask=in_group, other=0.0).to(tl.float32) * LOG2_E
    new_highest = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - new_highest)
    total = denominator * shrink + tl.exp2(sink - new_highest)
    return new_highest, shrink, tl.where(denominator > 0, total, 0.0)
