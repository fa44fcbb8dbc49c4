"""The pool of Inductor's buffers: memory is given out once at a time, and no more than allowed."""

from __future__ import annotations

import gc
import io
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgeweave.compile import _buffers
from edgeweave.compile._buffers import Pool, large_buffers

MIB = 1 << 20


@pytest.fixture
def pool(monkeypatch) -> Pool:
    pool = Pool(64 * MIB)
    monkeypatch.setattr(_buffers, "_pool", lambda: pool)
    return pool


def enter_and_leave() -> None:
    with large_buffers():
        pass


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


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[3:],
        torch.Tensor.detach,
        torch.Tensor.numpy,
        torch.Tensor.untyped_storage,
        torch.utils.dlpack.to_dlpack,
        lambda t: memoryview(t.numpy()),
    ],
)
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


def resized(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(64 * MIB)


def emptied(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [resized, emptied])
def test_a_block_that_its_user_has_resized_leaves_the_pool(pool, change) -> None:
    first = floats(1024, 1024)
    change(first)
    del first
    second = floats(1024, 1024)
    assert second.untyped_storage().nbytes() == 4 * MIB
    assert pool.kept_bytes == 4 * MIB


def test_memory_shared_with_another_process_is_not_given_out_again(pool) -> None:
    # As when it is put into a queue: this process may drop it, and the other one still reads it.
    first = floats(1024, 1024).fill_(1.0)
    first.share_memory_()
    descriptor, size = first.untyped_storage()._share_fd_cpu_()
    theirs = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
    del first
    gc.collect()
    floats(1024, 1024).fill_(2.0)
    assert torch.empty(0).set_(theirs)[:10].tolist() == [1.0] * 10


def test_a_lazy_clone_keeps_its_values(pool) -> None:
    first = floats(1024, 1024).fill_(1.0)
    clone = torch._lazy_clone(first)
    del first
    floats(1024, 1024).fill_(2.0)
    assert clone[0, :3].tolist() == [1.0] * 3


def test_what_others_have_left_in_a_block_is_not_saved_with_a_tensor(pool) -> None:
    floats(1024, 1090).fill_(7.0)
    second = floats(1024, 1030).fill_(1.0)
    assert second.untyped_storage().nbytes() > second.numel() * 4
    file = io.BytesIO()
    torch.save(second, file)
    assert struct.pack("f", 7.0) * 4 not in file.getvalue()


def test_modes_and_the_default_device_do_not_matter(pool) -> None:
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    for _ in range(2):  # a new block, and one that was there
        with Nothing(), torch.device("meta"):
            found = _buffers._empty_strided_cpu((1024, 1024), (1024, 1), torch.float32)
        assert (found.device.type, found._version, found._base) == ("cpu", 0, None)
        del found


def test_tensors_of_inference_mode_are_such_and_others_are_not(pool) -> None:
    with torch.inference_mode():
        assert floats(1024, 1024).is_inference()
    later = floats(1024, 1024)
    assert not later.is_inference()
    with torch.inference_mode():
        assert floats(1024, 1024).is_inference()


def test_no_more_than_some_blocks_of_a_size_are_looked_at(pool) -> None:
    pool.most_bytes = 1000 * MIB
    held = [floats(512, 512) for _ in range(_buffers._MOST_BLOCKS + 3)]
    assert pool.kept_bytes == _buffers._MOST_BLOCKS * MIB
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


def test_threads_never_share_a_block(pool) -> None:
    def work(number: int) -> bool:
        for _ in range(200):
            mine = floats(512, 512).fill_(number)
            if not bool((mine == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_can_go_on_while_a_thread_holds_the_pool(pool) -> None:
    inside, stop = threading.Event(), threading.Event()

    def hold() -> None:
        with _buffers._lock:
            inside.set()
            stop.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if floats(1024, 1024).shape == (1024, 1024) else 1)
    stop.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_compilations_in_two_threads_do_not_wait_for_each_other() -> None:
    with large_buffers():
        with ThreadPoolExecutor(1) as threads:
            threads.submit(enter_and_leave).result(timeout=30)
        assert torch._C._dynamo.guards._empty_strided_cpu is _buffers._empty_strided_cpu
    assert torch._C._dynamo.guards._empty_strided_cpu is _buffers._plain


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
