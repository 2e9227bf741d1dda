"""Warps, shared memory, copies, products: exchanges between lanes, races, bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx.emulator import Fault
from tests.ptx.emulator.hopper import TensorMap
from tests.ptx.probes import LANES, drawn, execute, from_bf16, small, to_bf16


@pytest.mark.parametrize("mode", ["bfly", "up", "down", "idx"])
def test_shuffles(mode: str):
    x, out = drawn("b32", 1), np.zeros(LANES, "u4")
    execute(
        f"""
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd10, %rd0; add.s64 %rd12, %rd10, %rd1;
        ld.global.b32 %r1, [%rd11];
        shfl.sync.{mode}.b32 %r2, %r1, 5, {0 if mode == "up" else 31}, -1;
        st.global.b32 [%rd12], %r2;
        """,
        [x, out],
    )
    warps, lane = x.reshape(-1, 32), np.arange(32)
    other = {"bfly": lane ^ 5, "up": lane - 5, "down": lane + 5, "idx": lane * 0 + 5}[mode]
    other = np.where((other >= 0) & (other < 32), other, lane)
    assert (out.reshape(-1, 32) == warps[:, other]).all()


def test_a_reduction_over_a_warp():
    x, out = small("s32", 1), np.zeros(LANES, "i4")
    execute(
        """
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd11, %rd10, %rd0; add.s64 %rd12, %rd10, %rd1;
        ld.global.b32 %r1, [%rd11]; redux.sync.add.s32 %r2, %r1, -1; st.global.b32 [%rd12], %r2;
        """,
        [x, out],
    )
    assert (out.reshape(-1, 32) == x.reshape(-1, 32).sum(1, keepdims=True)).all()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_in_shared_memory(trans: str):
    """Stored as rows by plain stores, read as matrices, stored as matrices, read as rows."""
    x, out, back = drawn("b16", 1, 32 * 8), np.zeros((32, 4), "u4"), np.zeros(32 * 8, "u2")
    execute(
        f"""
        mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd10, %rd0; add.s64 %rd12, %rd10, %rd1;
        add.s64 %rd13, %rd10, %rd2; shl.b32 %r1, %r0, 4;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd11];
        st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r6, %r7, %r8, %r9}}, [%r1];
        st.global.v4.b32 [%rd12], {{%r6, %r7, %r8, %r9}};
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1 + 1024], {{%r6, %r7, %r8, %r9}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1 + 1024];
        st.global.v4.b32 [%rd13], {{%r2, %r3, %r4, %r5}};
        """,
        [x, out, back],
        lanes=32,
    )
    matrices = x.reshape(4, 8, 8)
    matrices = matrices.swapaxes(1, 2) if trans else matrices
    for lane in range(32):
        for index in range(4):
            pair = matrices[index, lane // 4, 2 * (lane % 4) :][:2].astype("u4")
            assert out[lane, index] == pair[0] | pair[1] << 16
    assert (back == x).all()


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_products_of_fragments(kind: str):
    """Fragments by the formulas of PTX's manual, one lane at a time."""
    depth = 8 if kind == "tf32" else 16
    rng = np.random.default_rng(0)
    a, w, c = (rng.standard_normal(s).astype("f4") for s in ((16, depth), (depth, 8), (16, 8)))
    left, right = np.zeros((32, 4), "u4"), np.zeros((32, 2), "u4")
    acc, out = np.zeros((32, 4), "f4"), np.zeros((32, 4), "f4")
    half = {"bf16": to_bf16, "f16": lambda x: np.asarray(x).astype("f2").view("u2")}.get(kind)
    for lane in range(32):
        group, within = lane >> 2, lane & 3
        for i in range(4):
            acc[lane, i] = c[group + 8 * (i >> 1), within * 2 + (i & 1)]
        if half is None:
            i = np.arange(4)
            left[lane] = a[group + 8 * (i & 1), within + 4 * (i >> 1)].view("u4")
            right[lane] = w[within + 4 * i[:2], group].view("u4")
            continue
        for i in range(8):
            row, column = group + 8 * (i // 2 % 2), within * 2 + (i & 1) + 8 * (i >= 4)
            left[lane, i // 2] |= np.uint32(half([a[row, column]])[0]) << np.uint32(16 * (i & 1))
        for i in range(4):
            row = within * 2 + (i & 1) + 8 * (i >= 2)
            right[lane, i // 2] |= np.uint32(half([w[row, group]])[0]) << np.uint32(16 * (i & 1))
    execute(
        f"""
        mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd10, %rd0; add.s64 %rd12, %rd10, %rd2;
        add.s64 %rd13, %rd10, %rd3; mul.wide.u32 %rd14, %r0, 8; add.s64 %rd14, %rd14, %rd1;
        ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd11];
        ld.global.v2.b32 {{%r5, %r6}}, [%rd14];
        ld.global.v4.b32 {{%r7, %r8, %r9, %r10}}, [%rd12];
        mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32
            {{%r7, %r8, %r9, %r10}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7, %r8, %r9, %r10}};
        st.global.v4.b32 [%rd13], {{%r7, %r8, %r9, %r10}};
        """,
        [left, right, acc, out],
        lanes=32,
    )
    if half is None:
        a, w = ((x.view("u4") & np.uint32(0xFFFFE000)).view("f4") for x in (a, w))
    else:
        read = from_bf16 if kind == "bf16" else lambda x: x.view("f2").astype("f4")
        a, w = (read(half(x.ravel())).reshape(x.shape) for x in (a, w))
    expected = (c.astype("f8") + a.astype("f8") @ w.astype("f8")).astype("f4")
    for lane in range(32):
        rows, columns = (lane >> 2) + np.array([0, 0, 8, 8]), (lane & 3) * 2 + np.array([0, 1] * 2)
        assert np.allclose(out[lane], expected[rows, columns], rtol=1e-6, atol=1e-6)


COPY = """
    shl.b32 %r1, %r0, 4; mul.wide.u32 %rd10, %r0, 16; add.s64 %rd11, %rd10, %rd0;
    add.s64 %rd12, %rd10, %rd1;
    cp.async.cg.shared.global [%r1], [%rd11], 16;
    cp.async.commit_group;
    {wait}
    ld.shared::cta.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
    st.global.v4.b32 [%rd12], {{%r2, %r3, %r4, %r5}};
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_happens_late_or_early(early: bool):
    x, out = drawn("b32", 1, 4 * LANES), np.zeros(4 * LANES, "u4")
    execute(COPY.format(wait="cp.async.wait_group 0;"), [x, out], early=early)
    assert (out == x).all()
    execute(COPY.format(wait="cp.async.wait_group 1;"), [x, out], early=early)
    # without the wait, a late copy leaves the NaN of fresh shared memory
    assert (out == (x if early else 0xFFFFFFFF)).all()


EXCHANGE = """
    shl.b32 %r1, %r0, 2; sub.s32 %r2, 252, %r1;
    st.shared.b32 [%r1], %r0;
    {barrier}
    ld.shared.b32 %r3, [%r2];
    mul.wide.u32 %rd10, %r0, 4; add.s64 %rd10, %rd10, %rd0; st.global.b32 [%rd10], %r3;
"""


@pytest.mark.parametrize("by_warp", [False, True])
def test_a_missing_barrier_is_a_race(by_warp: bool):
    out = np.zeros(LANES, "u4")
    execute(EXCHANGE.format(barrier="bar.sync 0;"), [out], by_warp=by_warp, races=True)
    assert (out == np.arange(LANES)[::-1]).all()
    with pytest.raises(Fault, match="race"):
        execute(EXCHANGE.format(barrier=""), [out], by_warp=by_warp, races=True)


def test_lanes_that_part_meet_again():
    """A loop of a number of rounds that differs by lane, and an instruction under a predicate."""
    out = np.zeros(LANES, "u4")
    execute(
        """
        mov.b32 %r1, 0; mov.b32 %r2, %r0;
        $L1:
        setp.eq.b32 %p1, %r2, 0; @%p1 bra $L2;
        add.s32 %r1, %r1, %r2; sub.s32 %r2, %r2, 1; bra.uni $L1;
        $L2:
        and.b32 %r3, %r0, 1; setp.ne.b32 %p2, %r3, 0; @!%p2 add.s32 %r1, %r1, 1000;
        mul.wide.u32 %rd10, %r0, 4; add.s64 %rd10, %rd10, %rd0; st.global.b32 [%rd10], %r1;
        """,
        [out],
    )
    lane = np.arange(LANES)
    assert (out == lane * (lane + 1) // 2 + 1000 * (lane % 2 == 0)).all()


def test_memory_of_no_tensor_is_a_fault():
    out = np.zeros(LANES - 1, "u4")
    body = "mul.wide.u32 %rd10, %r0, 4; add.s64 %rd10, %rd10, %rd0; st.global.b32 [%rd10], %r0;"
    with pytest.raises(Fault, match="1 lanes out of bounds"):
        execute(body, [out])


def box(rows: np.ndarray, swizzle: int = 3, rounds: bool = False) -> TensorMap:
    """Make a tensor map whose box is a whole matrix."""
    tensor = torch.from_numpy(rows.view({2: "i2", 4: "f4"}[rows.itemsize]))
    return TensorMap(tensor, [*rows.shape], [rows.shape[1], 1], [*rows.shape], swizzle, rounds)


def test_a_tensor_map_rounds_to_tf32_and_pads_with_zeros():
    x = np.random.default_rng(0).standard_normal((8, 32)).astype("f4")
    rounded = box(x, rounds=True).read([4, 0]).view("f4")
    assert (rounded.view("u4") & 0x1FFF == 0).all()
    assert (np.abs(rounded[:4] - x[4:]) <= np.abs(x[4:]) * 2.0**-11).all()
    assert (rounded[4:] == 0).all()
    assert (box(x).read([0, 0]).view("f4") == x).all()


LOAD_TILES = """
    mov.b64 %rd20, 53248; mov.b64 %rd21, 53249; setp.eq.b32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [12288], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [12288], {nbytes};
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [0], [%rd20, {{0, 0}}], [12288];
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [8192], [%rd21, {{0, 0}}], [12288];
    $WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [12288], 0;
    @!%p2 bra $WAIT;
"""
DESCRIPTOR = (1 << 62) | (64 << 32)


@pytest.mark.parametrize("by_warp", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_products_of_a_warp_group(by_warp: bool, early: bool):
    """x [64, 64] times w [16, 64]', both copied by tensor maps into rows of 128 bytes, swizzled."""
    rng = np.random.default_rng(0)
    x, w = (to_bf16(rng.standard_normal(s).astype("f4").ravel()).reshape(s)
            for s in ((64, 64), (16, 64)))  # fmt: skip
    out, registers = np.zeros((128, 8), "f4"), ", ".join(f"%r{i}" for i in range(10, 18))
    steps = "".join(
        f"""
        mov.b64 %rd22, {DESCRIPTOR + 2 * step}; mov.b64 %rd23, {DESCRIPTOR + 512 + 2 * step};
        wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {{{registers}}}, %rd22, %rd23, {int(step > 0)}, 1, 1, 0, 0;
        """
        for step in range(4)
    )
    body = f"""
        {LOAD_TILES.format(nbytes=2 * (x.size + w.size))}
        wgmma.fence.sync.aligned; {steps}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        mul.wide.u32 %rd10, %r0, 32; add.s64 %rd10, %rd10, %rd0;
        st.global.v4.b32 [%rd10], {{%r10, %r11, %r12, %r13}};
        st.global.v4.b32 [%rd10 + 16], {{%r14, %r15, %r16, %r17}};
    """
    maps = {53248: box(x), 53249: box(w)}
    execute(body, [out], lanes=128, maps=maps, by_warp=by_warp, early=early)
    wide_x, wide_w = (from_bf16(t.ravel()).reshape(t.shape).astype("f8") for t in (x, w))
    expected = wide_x @ wide_w.T
    for thread in range(128):
        warp, lane, i = thread // 32, thread % 32, np.arange(8)
        rows = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
        columns = 8 * (i // 4) + 2 * (lane % 4) + i % 2
        assert np.allclose(out[thread], expected[rows, columns], rtol=1e-5, atol=1e-5)


def test_bytes_that_do_not_come_are_a_fault():
    x, w = np.zeros((64, 64), "u2"), np.zeros((16, 64), "u2")
    body = LOAD_TILES.format(nbytes=2 * (x.size + w.size) + 16)
    with pytest.raises(Fault, match="does not end"):
        execute(body, [], lanes=128, maps={53248: box(x), 53249: box(w)}, by_warp=True)


STORE_AND_MULTIPLY = """
    shl.b32 %r1, %r0, 4; mov.b32 %r2, 1065369472;
    st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1 + 2048], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1 + 4096], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1 + 6144], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1 + 8192], {{%r2, %r2, %r2, %r2}};
    {fence}
    bar.sync 0;
    {fence_of_reader}
    mov.b64 %rd22, {left}; mov.b64 %rd23, {right};
    {group_fence}
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
        {{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}}, %rd22, %rd23, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd10, %r0, 16; add.s64 %rd10, %rd10, %rd0;
    st.global.v4.b32 [%rd10], {{%r10, %r11, %r12, %r13}};
"""
FENCE = "fence.proxy.async.shared::cta;"
PARTS = {"fence": FENCE, "group_fence": "wgmma.fence.sync.aligned;"}


@pytest.mark.parametrize("by_warp", [False, True])
@pytest.mark.parametrize("missing", [None, *PARTS])
def test_products_need_fences(by_warp: bool, missing: str | None):
    """A product of ones that were stored, not copied, into shared memory."""
    out = np.zeros((128, 4), "f4")
    places = {"left": DESCRIPTOR, "right": DESCRIPTOR + 512}
    parts = {name: "" if name == missing else text for name, text in PARTS.items()}
    body = STORE_AND_MULTIPLY.format(**parts, **places, fence_of_reader="")
    if missing is None:
        execute(body, [out], lanes=128, by_warp=by_warp)
        assert (out == 16).all()
        return
    message = {"fence": "without a fence", "group_fence": "no wgmma.fence"}[missing]
    with pytest.raises(Fault, match=message):
        execute(body, [out], lanes=128, by_warp=by_warp)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_fence_of_the_reader_behind_a_barrier(is_alone: bool):
    """It passes the stores of all warps, to products of its own warp."""
    out = np.zeros((128, 4), "f4")
    fence = f"setp.lt.u32 %p1, %r0, 32; @%p1 {FENCE}" if is_alone else FENCE
    parts = {"fence": "", "fence_of_reader": fence, "group_fence": PARTS["group_fence"]}
    places = {"left": DESCRIPTOR, "right": DESCRIPTOR + 512}
    body = STORE_AND_MULTIPLY.format(**parts, **places)
    if is_alone:
        with pytest.raises(Fault, match="without a fence"):
            execute(body, [out], lanes=128, by_warp=True)
        return
    execute(body, [out], lanes=128, by_warp=True)
    assert (out == 16).all()


@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_a_barrier_is_made_before_other_warps_use_it(barrier: str):
    body = f"""
        setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p2, %r0, 32;
        @%p1 mbarrier.init.shared::cta.b64 [12288], 1;
        {barrier}
        @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [12288], 0;
    """
    if barrier:
        execute(body, [], by_warp=True)
        return
    with pytest.raises(Fault, match="at the same time"):
        execute(body, [], by_warp=True)
