"""`python -m triton_kv plan`, tables and pictures: numbers that can be worked out by hand."""

import importlib.util
import json
import re
import xml.dom.minidom
from pathlib import Path

import pytest
import torch

import triton_kv as tkv
from tests.cpu.test_configs import CODESTRAL_MAMBA
from triton_kv.cli import main
from triton_kv.description import block_takers, tokens_of_one_sequence
from triton_kv.picture import pieces_of
from triton_kv.plan_command import parse_bytes

ROOT = Path(__file__).parents[2]
GIB, MIB = 1 << 30, 1 << 20
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
ATTENTION = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)  # 4 KiB a block of 16 tokens
WINDOW = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32, window=100)
STATE = tkv.MambaSpec([("conv", (3, 64), torch.bfloat16), ("ssm", (4, 8, 16), torch.float32)])  # 384 + 2048 bytes
MIXED = [tkv.LayerGroup("attention", {"a.0": ATTENTION, "a.1": ATTENTION}), tkv.LayerGroup("mamba", {"m.0": STATE})]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_plan_as_json(config, capsys):
    assert main(["plan", config, "--memory", "141GiB", "--utilization", "0.92", "--tp", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # One KV head a rank: 32 layers x 2 segments, of 16 x 128 x 2 = 4096 bytes a block each; a granule is 512 blocks.
    # int(0.92 x 141 GiB) = 139285520220 bytes are 1037 granules in each of 64 segments: 1037 x 512 = 530944 blocks.
    assert int(0.92 * 141 * GIB) // (64 * 2 * MIB) == 1037
    assert report["num_blocks"] == 530944
    assert report["tokens_of_one_sequence"] == 530944 * 16
    assert report["sequences_of_any_length"] is None
    assert report["mapped_bytes"] == 1037 * 64 * 2 * MIB <= report["limit_bytes"] == int(0.92 * 141 * GIB)
    (group,) = report["groups"]
    assert (group["group"], len(group["layers"]), group["segments"], group["page_bytes"]) == (
        "attention",
        32,
        64,
        [8192],
    )


def test_plan_for_people(config, capsys):
    assert main(["plan", config, "--memory", "24GiB", "--used", "16GiB", "--dtype", "fp16", "--block-size", "32"]) == 0
    out = capsys.readouterr().out
    # 24 x 0.92 - 16 = 6.08 GiB; a granule holds 2 MiB / (32 x 8 x 128 x 2 = 64 KiB) = 32 blocks in each of 64 segments,
    # 128 MiB together: 48 of them, 1536 blocks of 32 tokens.
    assert "1536 blocks of 32 tokens: 6.00 GiB of at most 6.08 GiB" in out
    assert "49152 tokens" in out
    assert "32: layers.0 to layers.31" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "141Gi"], "'141Gi' is no size"),
        (["--memory", "1GiB", "--tp", "3"], "32 attention heads are not divisible by the tensor-parallel size 3"),
        (["--memory", "1GiB", "--utilization", "1.5"], r"utilization must lie in \(0, 1\]"),
        (["--memory", "1GiB", "--layout", "LTBNHX"], "unknown X"),
        (["--memory", "1GiB", "--used", "2GiB"], "--used 2147483648 bytes is more than --memory 1073741824 bytes"),
        (["--memory", "1GiB", "--dtype", "float8_e4m3fn"], "not supported yet"),
        (["--memory", "1GiB", "--pack"], "a packed block is one piece"),
    ],
    ids=["size", "tp", "utilization", "layout", "used", "dtype", "pack"],
)
def test_plan_refuses(config, arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", config, *arguments])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ({"model_type": "gemma3_text", "layer_types": 5}, "layer_types must be a list"),
        ({"model_type": ["llama"]}, "model_type must be one word"),
    ],
    ids=["pattern", "layer_types", "model_type"],
)
def test_plan_refuses_a_config(tmp_path, fields, message, capsys):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(tmp_path), "--memory", "1GiB"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_where_nothing_fits(config, capsys):
    assert main(["plan", config, "--memory", "64MiB"]) == 1
    assert "not even one block fits" in capsys.readouterr().err
    assert main(["plan", config, "--memory", "1GiB"]) == 0


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("141GiB", 141 << 30), ("1.5 TiB", 3 << 39), ("80GB", 80 * 10**9), ("4096", 4096)]
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_plan_of_states_counts_sequences_of_any_length(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CODESTRAL_MAMBA))
    arguments = ["plan", str(tmp_path), "--memory", "24GiB", "--utilization", "1"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 64 layers of 61440 + 4194304 bytes, each a segment of its own. 24 GiB are 192 granules a layer, which hold
    # 192 x 2 MiB // 4255744 = 94 states: one a sequence.
    assert 192 * 2 * MIB // 4255744 == 94
    assert report["num_blocks"] == report["sequences_of_any_length"] == 94
    assert report["tokens_of_one_sequence"] is None
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "94 sequences of any length"
    specs = tkv.specs_from_config(CODESTRAL_MAMBA)
    with tkv.KVCache.reserve(specs, block_size=16, capacity=512, memory=tkv.FakeMemory()) as cache:
        plan = tkv.plan_blocks(cache, headroom_bytes=0, num_blocks=90, spare_blocks=1)
        assert plan.longest_sequence_tokens is None
        assert [plan.num_sequences(tokens) for tokens in (1, 16, 10**9)] == [89, 89, 89]
        assert ", 89 sequences of any length" in str(plan)
        assert tkv.Plan.from_json(plan.to_json()).longest_sequence_tokens is None


def geometry(groups, **options) -> tkv.CacheGeometry:
    return tkv.arrange(groups, **{"block_size": 16, "capacity": 60, "granularity": 4096, **options})


def test_table():
    lines = geometry(MIXED, shared_by="groups").describe(10).splitlines()
    assert [line.split() for line in lines] == [
        ["group", "layers", "layout", "page", "bytes", "segments", "padding", "bytes", "bytes", "at", "10", "blocks"],
        ["attention", "2:", "a.0", "to", "a.1", "LBTNHD", "4096", "2", "0", "81920", "*"],
        ["mamba", "m.0", "LB", "2432", "1", "1664", "40960", "*"],
        ["-" * max(map(len, lines[:3]))],
        ["total", "3", "8192", "2", "1664", "81920"],
        ["*", "in", "buffers", "that", "several", "groups", "share;", "the", "total", "counts", "them", "once"],
    ]
    with tkv.KVCache.reserve(MIXED, block_size=16, capacity=60, memory=tkv.FakeMemory(4096)) as cache:
        cache.extend(7)
        assert cache.describe() == cache.geometry.describe(7)
        assert str(cache.mapped_bytes) == cache.describe().splitlines()[-1].split()[-1]
        with pytest.raises(ValueError, match=r"0\.\.60"):
            cache.describe(61)


@pytest.mark.parametrize(
    ("groups", "options", "blocks", "tokens"),
    [
        (MIXED, {}, 10, 160),
        # a state serves a sequence of any length
        ([tkv.LayerGroup("mamba", {"m.0": STATE})], {}, 10, None),
        ([tkv.LayerGroup("mamba", {"m.0": STATE})], {}, 0, 0),
        # two kinds that overlay each other take a block each
        ([tkv.LayerGroup(name, {name: STATE}) for name in "xy"], {"shared_by": "groups"}, 2, None),
        ([tkv.LayerGroup(name, {name: STATE}) for name in "xy"], {"shared_by": "groups"}, 1, 0),
        # 10 blocks: one for the state, 9 for attention
        (MIXED, {"shared_by": "groups"}, 10, 144),
        (MIXED, {"shared_by": "groups", "packed": True}, 10, 144),
        (MIXED, {"packed": True}, 10, 160),
        # a window of 100 meets at most 1 + ceil(99 / 16) = 8 blocks; the full group has the other 22
        (
            [tkv.LayerGroup("full", {"f": ATTENTION}), tkv.LayerGroup("window", {"w": WINDOW})],
            {"shared_by": "groups"},
            30,
            352,
        ),
        # both need as many while the window is not full: 4 blocks each
        (
            [tkv.LayerGroup("full", {"f": ATTENTION}), tkv.LayerGroup("window", {"w": WINDOW})],
            {"shared_by": "groups"},
            8,
            64,
        ),
    ],
    ids=[
        "apart",
        "state",
        "no_block",
        "states_shared",
        "one_block_of_two",
        "shared",
        "shared_and_packed",
        "packed",
        "window",
        "short",
    ],
)
def test_tokens_of_one_sequence(groups, options, blocks, tokens):
    assert tokens_of_one_sequence(block_takers(geometry(groups, **options)), blocks) == tokens


def test_equal_groups():
    groups = tkv.equal_groups(
        [
            tkv.LayerGroup("mamba", {f"m.{index}": STATE for index in range(7)}),
            tkv.LayerGroup("attention", {f"a.{index}": ATTENTION for index in range(3)}),
        ]
    )
    assert [(group.name, len(group.names)) for group in groups] == [
        ("mamba.0", 3),
        ("mamba.1", 3),
        ("mamba.2", 1),
        ("attention", 3),
    ]
    assert len(geometry(groups, shared_by="groups").buffers) == 3


def test_text_picture():
    small = geometry({"one": tkv.LayerGroup("g", {"m.0": STATE}, page_bytes=3072)}.values(), capacity=4)
    # 4 blocks of 3072 bytes: 3 granules exactly; two blocks need 1.5 of them
    assert small.layout_picture(2, form="text").splitlines() == [
        "2 of 4 blocks committed, granules of 4096 bytes",
        "",
        "buffer 0: 1 segment, 3072 bytes a block",
        "  |" + "0" * 18 + "1" * 18 + "2" * 18 + "3" * 18 + "|",
        "  |" + ("AA" + "B" * 12 + "." * 4) * 4 + "| A m.0 conv, B m.0 ssm",
        "  |" + "#" * 48 + "-" * 24 + "| mapped: 2 granules",
    ]


NAMED = ["LTBNHD", "LBTNHD", "LBTHND", "TLBNHD", "BLTNHD", "LBNHTD", "LBHNTD", "LHBNTD", "BLNHTD", "BLHNTD", "BHLNTD"]


@pytest.mark.parametrize("order", [*NAMED, "LTHBND", "LBHTND", "BTLHND", "LBNTHD"])
@pytest.mark.parametrize("value_dim", [4, 6])
def test_pieces_of_a_picture_are_where_the_views_say(order, value_dim):
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=4, dtype=torch.float32, v_head_dim=value_dim)
    options = {"block_size": 2, "capacity": 3, "granularity": 256, "layout": order}
    try:
        small = tkv.arrange([tkv.LayerGroup("g", {"x": spec, "y": spec})], **options)
    except ValueError:
        assert value_dim != spec.head_dim
        return
    (part,) = small.buffers
    drawn = {}
    for piece in pieces_of(small, 0):
        start = piece.segment * part.segment_stride_bytes + piece.offset
        for byte in range(start, start + piece.num_bytes):
            assert byte not in drawn
            drawn[byte] = (piece.label.split(" ")[0], *piece.label.split(" head ")[1:], piece.block)
            if " K+V" not in piece.label:
                drawn[byte] += (piece.label.split(" ")[1],)
    rows = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).tolist()
    for layer in small.layers:
        for kv, strides, dim in (("K", layer.layout.k_strides, 4), ("V", layer.layout.v_strides, value_dim)):
            for block, token, head in rows:
                at = (kv == "V") * layer.layout.v_offset
                at += block * strides[0] + token * strides[1] + head * strides[2]
                for channel in range(dim):
                    byte = layer.base_bytes + 4 * (at + channel * strides[3])
                    found = drawn[byte]
                    assert found[0] == layer.name
                    assert block in found
                    assert {kv, *"KV"} & set(found) <= {kv}
                    assert set(found[1:]) & {"0", "1"} <= {str(head)}
    assert len(drawn) == 3 * small.block_bytes


def test_a_picture_shows_heads_before_layers():
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=4, dtype=torch.float32)
    small = geometry([tkv.LayerGroup("g", {"x": spec, "y": spec})], layout="BHLNTD", capacity=2)
    labels = [piece.label for piece in pieces_of(small, 0) if piece.block == 1]
    assert labels == ["x K+V head 0", "y K+V head 0", "x K+V head 1", "y K+V head 1"]


def test_every_named_layout_has_a_picture():
    for order in NAMED:
        assert (ROOT / "docs" / "layouts" / f"{order}.svg").exists()


def test_svg_picture_shows_every_segment_block_and_mapped_granule():
    small = geometry(MIXED, capacity=6, shared_by="groups")
    drawing = xml.dom.minidom.parseString(small.layout_picture(3))
    rects = drawing.getElementsByTagName("rect")
    bars = [rect for rect in rects if rect.getAttribute("height") == "5"]
    assert len(bars) * 4096 == small.mapped_bytes_at(3)
    titles = [title.firstChild.data for title in drawing.getElementsByTagName("title")]
    assert titles.count("block 2: a.0 = m.0, 4096 bytes") == 1
    assert [title for title in titles if title.startswith("block 5")] == [
        "block 5: a.0 = m.0, 4096 bytes",
        "block 5: a.1 K, 2048 bytes",
        "block 5: a.1 V, 2048 bytes",
    ]


def test_pictures_of_large_caches_are_refused():
    with pytest.raises(ValueError, match="draw a small example"):
        geometry(MIXED, capacity=1000).layout_picture(3)
    with pytest.raises(ValueError, match='"svg" or "text", got'):
        geometry(MIXED).layout_picture(3, form="png")


def test_docs_show_what_is_drawn_now():
    spec = importlib.util.spec_from_file_location("draw_layouts", ROOT / "docs" / "draw_layouts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = module.files()
    stale = [path for path, text in files.items() if (ROOT / "docs" / path).read_text() != text]
    assert not stale, "run python docs/draw_layouts.py"
    drawings = {f"layouts/{path.name}" for path in (ROOT / "docs" / "layouts").iterdir()}
    assert drawings == set(files) - {"layouts.md"}
