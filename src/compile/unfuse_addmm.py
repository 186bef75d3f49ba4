"""Separates matrix additions from matrix products that Inductor has fused.

Inductor fuses a product and a sum into one call: `addmm(residual, x, weight)`. For a bias, the sum
is a cheap epilogue of the product. But a whole matrix is first copied to the place of the result,
which the product then reads and writes. That costs another kernel for each projection that ends in
the residual stream, and two more passes over its rows in memory. As a separate sum, it is fused
into the following norm.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_addmm = torch.ops.aten.addmm.default
_mm = torch.ops.aten.mm.default
_add = torch.ops.aten.add.Tensor


class UnfuseAddmm(CustomGraphPass):
    """Turns `addmm` of a matrix into `mm` and `add`, which round as the eager functions do.

    Runs after Inductor's own passes.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place."""
        for node in list(graph.find_nodes(op="call_function", target=_addmm)):
            summand, left, right = node.args
            if summand.meta["val"].dim() != 2 or node.kwargs:
                continue
            with graph.inserting_before(node):
                product = graph.call_function(_mm, (left, right))
                total = graph.call_function(_add, (summand, product))
            product.meta["val"] = _mm(left.meta["val"], right.meta["val"])
            total.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(total)
            graph.erase_node(node)

    def uuid(self) -> bytes:
        """Digest of this file, for Inductor's cache."""
        return get_hash_for_files((__file__,))
