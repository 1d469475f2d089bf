"""What servers read in the source of the modelling file that travels with per-layer models."""

import ast
import inspect
import textwrap

from headwise.runtime.modeling_headwise import ReducedAttention


def test_forward_looks_the_attention_up_and_calls_it_once_with_its_scale():
    tree = ast.parse(textwrap.dedent(inspect.getsource(ReducedAttention.forward)))
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) in names]
    assert len(calls) == 1
    assert [ast.unparse(k.value) for k in calls[0].keywords if k.arg == "scaling"] == ["self.scaling"]
