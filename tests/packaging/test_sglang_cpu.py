"""The stand-ins that let SGLang run without a GPU do what SGLang relies on."""

import importlib.metadata

import pytest
import torch

sgl_kernel = pytest.importorskip("sgl_kernel")

if not sgl_kernel.__version__.endswith("kvhub.cpu"):
    pytest.skip("a real sgl_kernel is installed here", allow_module_level=True)


def test_it_is_not_installed_beside_the_real_extension() -> None:
    installed = {(dist.name or "").lower() for dist in importlib.metadata.distributions()}
    assert "kvhub-sglang-cpu" in installed and "sglang-kernel" not in installed


def test_rows_move_in_every_buffer_even_where_places_overlap() -> None:
    buffers = [torch.arange(24.0).reshape(8, 3), torch.arange(16, dtype=torch.int16).reshape(8, 2)]
    expected = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 7])
    for buffer in expected:
        buffer[target] = buffer[source].clone()
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    widths = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses, widths, target, source)
    assert all(torch.equal(found, wanted) for found, wanted in zip(buffers, expected, strict=True))


def test_new_slots_are_written_into_the_table_of_requests() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([3, 6]), torch.tensor([9, 8, 7, 6]), 6
    )
    assert table.tolist() == [[0, 0, 0, 0, 7, 6], [0] * 6, [0, 9, 8, 0, 0, 0]]


def test_what_is_missing_says_so() -> None:
    with pytest.raises(RuntimeError, match="verify_tree_greedy_cpu is not part of kvhub-sglang-cpu"):
        sgl_kernel.verify_tree_greedy_cpu()


def test_no_operator_is_claimed() -> None:
    """SGLang takes its torch forwards where these are absent."""
    assert not hasattr(torch.ops.sgl_kernel, "weight_packed_linear")


def test_torchvision_imports_beside_a_cpu_torch() -> None:
    torchvision = pytest.importorskip("torchvision")
    assert torchvision.ops.nms is not None


@pytest.mark.parametrize("page_size", [1, 4])
def test_hicache_copies_are_each_others_inverse(page_size: int) -> None:
    hicache = pytest.importorskip("kvhub_sglang_cpu.hicache")
    layers, rows = 3, 8
    keys = [torch.randn(rows, 2) for _ in range(layers)]
    values = [torch.randn(rows, 2) for _ in range(layers)]
    pages = rows // page_size
    host = [torch.zeros(pages, layers, page_size, 2) for _ in range(2)]
    source = torch.arange(rows).flip(0)
    hicache.transfer_kv_all_layer_direct_lf_pf([*keys, *values], host, source, torch.arange(rows), page_size)
    back = [torch.zeros(rows, 2) for _ in range(2)]
    for layer in range(layers):
        hicache.transfer_kv_per_layer_direct_pf_lf(host, back, torch.arange(rows), source, layer, page_size)
        assert torch.equal(back[0], keys[layer]) and torch.equal(back[1], values[layer])
