"""The pool of Inductor's buffers: memory is given out once at a time, and no more than allowed."""

from __future__ import annotations

import gc

import pytest
import torch

from edgeweave.compile import _buffers
from edgeweave.compile._buffers import Pool

MIB = 1 << 20


@pytest.fixture
def pool(monkeypatch) -> Pool:
    pool = Pool(64 * MIB)
    monkeypatch.setattr(_buffers, "_pool", lambda: pool)
    return pool


def floats(*size: int) -> torch.Tensor:
    stride = torch.empty(size, device="meta").stride()
    return _buffers._empty_strided_cpu(size, stride, torch.float32)


def test_a_block_serves_the_next_tensor_when_its_own_is_gone(pool) -> None:
    first = floats(1024, 1024)
    address = first.data_ptr()
    del first
    assert floats(1024, 1024).data_ptr() == address
    assert pool.kept_bytes == 4 * MIB


def test_sizes_that_differ_little_share_blocks(pool) -> None:
    address = floats(1024, 1000).data_ptr()
    assert floats(1024, 990).data_ptr() == address


def test_what_is_in_use_is_not_given_out_again(pool) -> None:
    first = floats(1024, 1024)
    assert floats(1024, 1024).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("keep", [lambda t: t[3:], torch.Tensor.detach, torch.Tensor.numpy])
def test_whoever_holds_the_memory_keeps_it(pool, keep) -> None:
    first = floats(1024, 1024)
    address, held = first.data_ptr(), keep(first)
    del first
    gc.collect()
    second = floats(1024, 1024)
    assert second.data_ptr() != address
    del held
    assert floats(1024, 1024).data_ptr() == address


def test_saved_for_backward_is_in_use(pool) -> None:
    weight = torch.ones(1024, 1024, requires_grad=True)
    values = floats(1024, 1024).fill_(2.0)
    product = weight * values
    address = values.data_ptr()
    del values
    assert floats(1024, 1024).data_ptr() != address
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((1024, 1024), 2.0))


def test_the_pool_holds_no_more_than_it_may(pool) -> None:
    held = [floats(1024, 1024) for _ in range(20)]
    assert pool.kept_bytes == 64 * MIB
    assert len({tensor.data_ptr() for tensor in held}) == 20
    del held
    # Another size: what is free makes room for it.
    large = floats(8, 1024, 1024)
    assert pool.kept_bytes <= 64 * MIB
    assert large.shape == (8, 1024, 1024)


def test_what_is_free_can_be_given_back(pool) -> None:
    held = floats(1024, 1024)
    floats(2048, 1024)
    pool.release()
    assert pool.kept_bytes == 4 * MIB
    assert held.fill_(1.0).sum() == MIB


@pytest.mark.parametrize(
    ("size", "stride"), [((), ()), ((0, 5), (5, 1)), ((100,), (1,)), ((0,), (1,))]
)
def test_small_and_empty_tensors_are_torchs_own(pool, size, stride) -> None:
    found = _buffers._empty_strided_cpu(size, stride, torch.float64)
    assert (found.shape, found.stride(), found.dtype) == (size, stride, torch.float64)
    assert pool.kept_bytes == 0


def test_strides_and_types_are_as_asked_for(pool) -> None:
    found = _buffers._empty_strided_cpu((512, 3, 1024), (3072, 1, 3), torch.bfloat16)
    assert (found.stride(), found.dtype) == ((3072, 1, 3), torch.bfloat16)
    assert found._base is None
    assert found.untyped_storage().nbytes() >= 512 * 3 * 1024 * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_code_takes_its_buffers_from_the_pool_and_others_do_not(pool) -> None:
    def double(x):
        return torch.nn.functional.softmax(x, -1) @ x

    x = torch.randn(1024, 1024)
    torch._dynamo.reset()
    compiled = torch.compile(double, backend="edgeweave", options={"engine": "inductor"})
    torch.testing.assert_close(compiled(x), double(x), rtol=1e-4, atol=1e-4)
    assert pool.kept_bytes > 0
    assert torch._C._dynamo.guards._empty_strided_cpu is _buffers._plain


@pytest.mark.parametrize(("given", "limit"), [("0", 0), ("1000", 1000)])
def test_the_limit_can_be_set(monkeypatch, given, limit) -> None:
    monkeypatch.setenv("EDGEWEAVE_BUFFER_BYTES", given)
    assert _buffers._limit() == limit


def test_a_limit_that_is_no_number(monkeypatch) -> None:
    monkeypatch.setenv("EDGEWEAVE_BUFFER_BYTES", "4GB")
    with pytest.raises(ValueError, match="EDGEWEAVE_BUFFER_BYTES: must be a number of bytes"):
        _buffers._limit()


def test_the_usual_limit_is_a_share_of_the_memory(monkeypatch) -> None:
    monkeypatch.delenv("EDGEWEAVE_BUFFER_BYTES", raising=False)
    assert 0 < _buffers._limit() < _buffers._SHARE * 2**50


def test_a_pool_without_room_leaves_everything_to_torch(monkeypatch) -> None:
    monkeypatch.setattr(_buffers, "_pool", lambda: none)
    none = Pool(0)
    assert floats(1024, 1024).shape == (1024, 1024)
    assert none.kept_bytes == 0
