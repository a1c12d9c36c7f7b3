"""A key/value layer with several named streams: what happens to one happens to all."""

import copy

import pytest
import torch

from frankenstein_hf.modeling.cache import MixerKVLayer, MixerStaticKVLayer

B = 3


def stream(name: str, T: int, seed: int = 0) -> torch.Tensor:
    shape = {"key": (B, 2, T, 4), "latent": (B, T, 5)}[name]  # heads or none
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + T))


def filled(*sizes: int) -> MixerKVLayer:
    layer = MixerKVLayer()
    for T in sizes:
        mask = torch.ones(B, T, dtype=torch.bool)
        layer.count(mask, True)
        for name in ("key", "latent"):
            layer.extend(name, stream(name, T))
    return layer


def whole(name: str, *sizes: int) -> torch.Tensor:
    return torch.cat([stream(name, T) for T in sizes], dim=-2)


def test_streams_grow_together_and_are_counted_once():
    layer = filled(5, 1, 2)
    assert layer.get_seq_length() == 8 and layer.num_real.tolist() == [8] * B and layer.is_initialized
    for name in ("key", "latent"):
        assert torch.equal(layer.streams[name], whole(name, 5, 1, 2))
    assert layer.num_bytes() == 4 * B * 8 * (2 * 4 + 5)


def test_a_stream_that_misses_tokens_is_an_error():
    layer = filled(5)
    layer.count(torch.ones(B, 1, dtype=torch.bool), True)
    layer.extend("key", stream("key", 1))
    layer.count(torch.ones(B, 1, dtype=torch.bool), True)
    with pytest.raises(ValueError, match="'latent' would hold 6 tokens of 7 seen"):
        layer.extend("latent", stream("latent", 1))


def test_crop_cuts_every_stream_and_counts_real_tokens():
    layer = filled(5)
    keep = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    layer.count(keep, False)
    for name in ("key", "latent"):
        layer.extend(name, stream(name, 3))
    assert layer.num_real.tolist() == [8, 7, 6]
    layer.crop(-2)
    assert layer.num_real.tolist() == [6, 6, 5] and layer.keep.shape == (B, 6)
    for name in ("key", "latent"):
        assert torch.equal(layer.streams[name], whole(name, 5, 3)[..., :6, :])
    layer.crop(0)
    assert layer.get_seq_length() == 6
    with pytest.raises(ValueError, match="Cannot remove 7 tokens"):
        layer.crop(-7)


def test_batch_operations_and_copies_reach_every_stream():
    layer, rows = filled(4), torch.tensor([2, 0, 0])
    twin = copy.deepcopy(layer)
    layer.reorder_cache(rows)
    twin.batch_select_indices(torch.tensor([2, 0]))
    twin.batch_repeat_interleave(2)
    for name in ("key", "latent"):
        assert torch.equal(layer.streams[name], whole(name, 4)[rows])
        assert torch.equal(twin.streams[name], whole(name, 4)[[2, 2, 0, 0]])
    assert twin.num_real.tolist() == [4] * 4


def test_offload_prefetch_and_reset_work_without_keys_and_values():
    layer = filled(4)
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.streams["key"], whole("key", 4))
    layer.reset()
    assert layer.streams == {} and layer.get_seq_length() == 0 and not layer.is_initialized
    layer.offload()
    layer.prefetch()


def test_keys_and_values_live_beside_streams():
    layer = MixerKVLayer()
    for T in (3, 2):
        key = stream("key", T)
        layer.append(key, 2 * key, torch.ones(B, T, dtype=torch.bool), True)
        layer.extend("latent", stream("latent", T))
    layer.crop(-1)
    assert torch.equal(layer.values, 2 * whole("key", 3, 2)[:, :, :4])
    assert torch.equal(layer.streams["latent"], whole("latent", 3, 2)[:, :4])


def test_a_static_layer_holds_what_a_growing_one_does_in_places_that_never_move():
    layer, grown = MixerStaticKVLayer(max_cache_len=9), MixerKVLayer()
    masks = [torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool(), torch.tensor([[1, 1], [0, 1], [1, 1]]).bool()]
    for mask in masks:
        key = stream("key", mask.shape[1])
        whole_key, _ = layer.append(key, 2 * key, mask, False)
        expected, _ = grown.append(key, 2 * key, mask, False)
        assert whole_key.shape[-2] == 9 and torch.equal(whole_key[:, :, : expected.shape[-2]], expected)
    assert torch.equal(layer.keep[:, :5], grown.keep) and not layer.keep[:, 5:].any()
    assert torch.equal(layer.num_real, grown.num_real) and layer.get_seq_length() == 5
    for both in (layer, grown):
        both.crop(-1)
    assert torch.equal(layer.num_real, grown.num_real) and layer.get_seq_length() == 4
    with pytest.raises(ValueError, match="9 places, 4 of them taken; 6 more tokens do not fit"):
        layer.count(torch.ones(B, 6, dtype=torch.bool), True)
    layer.reset()
    assert layer.streams == {} and layer.get_seq_length() == 0 and layer.get_max_length() == 9


@pytest.mark.parametrize("static", [False, True])
def test_a_tail_lives_through_what_its_streams_live_through(static):
    """Here the sum of all tokens seen, kept beside a stream."""

    def advance(inputs, states, lengths):
        x = inputs["x"]
        if lengths is not None:
            x = x * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        return {"sum": states["sum"] + x.sum(1) if states else x.sum(1)}

    def call(layer, T, seed=0):
        keep, x = torch.ones(B, T, dtype=torch.bool), stream("latent", T, seed)
        layer.count(keep, True)
        layer.extend("latent", x)
        states = layer.tail.read(advance) or {}
        layer.tail.write(advance({"x": x}, states, None), {"x": x}, keep)

    layer = MixerStaticKVLayer(max_cache_len=9) if static else MixerKVLayer()
    call(layer, 3)
    with pytest.raises(ValueError, match="the past is not recorded"):
        layer.crop(-1)
    assert layer.get_seq_length() == 3  # refused before anything was cut
    layer.activate_past_recording()
    call(layer, 2)
    call(layer, 2, seed=7)
    layer.crop(-3)
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    seen = torch.cat([stream("latent", 3), stream("latent", 2)[:, :1]], dim=1)[[2, 0, 1]]
    assert torch.equal(layer.streams["latent"][:, :4], seen)
    torch.testing.assert_close(layer.tail.read(advance)["sum"], seen.sum(1))
    assert layer.num_bytes() == 4 * (layer.streams["latent"].numel() + B * 5)
    layer.reset()
    assert layer.tail.read(advance) is None and layer.tail.record_past
