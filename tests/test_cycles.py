"""No module imports another that, by whatever way, imports it: not in one room either, where layers say nothing."""

from graphlib import TopologicalSorter

import grimp


def test_no_module_imports_itself_by_way_of_others():
    graph = grimp.build_graph("headwise")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(list(TopologicalSorter(imports).static_order())) == len(graph.modules)
