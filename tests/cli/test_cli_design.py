"""`headwise design` as people call it: a budget in, a recommendation with its evidence out."""

import json

from tests.commands import headwise


def test_135m_is_not_advised_against_our_own_measurement():
    asked = ("design", "--params", "135M", "--context", "8192", "--vocab", "49152")
    shown = headwise(*asked)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "recommended: lean-width. Equal wall-clock decides" in shown.stdout
    found = json.loads(headwise(*asked, "--json").stdout)
    plans = {each["name"]: each["plan"] for each in found["candidates"]}
    assert {"textbook", "lean-width", "grouped", "deep-thin", "early-heads"} <= set(plans)
    chosen, usual = plans[found["recommended"]], plans["textbook"]
    assert {(layer["heads"], layer["qk_dim"]) for layer in chosen["layers"]} == {(24, 32)}
    assert chosen["predicted"]["kv_bytes_per_token"] < usual["predicted"]["kv_bytes_per_token"]
    assert {each["evidence"] for each in found["candidates"]} == {"measured", "formula only"}
    assert all(plan["budget"]["intrinsic_dim"] is None for plan in plans.values())
