"""Takes sums of matrices out of products again, where Inductor has put them.

Inductor makes one call of a product and a sum: `addmm(residual, x, weight)`. For a bias that is an
epilogue of the product. A whole matrix is copied to where the result goes first, and the product
then reads and writes it there: a kernel more for each projection that ends in the residual stream,
and its rows are in memory twice more. As a sum of its own it is fused into the norm that follows.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_addmm = torch.ops.aten.addmm.default
_mm = torch.ops.aten.mm.default
_add = torch.ops.aten.add.Tensor


class SeparateSums(CustomGraphPass):
    """`addmm` of a matrix becomes `mm` and `add`, which round as the eager functions do.

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
        """Of this file, for Inductor's cache."""
        return get_hash_for_files((__file__,))
