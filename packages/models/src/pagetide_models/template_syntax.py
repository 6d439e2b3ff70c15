"""Rewriting a parsed template so that what Jinja does natively passes through charging filters."""
# ruff: noqa: N802, N815 - Jinja finds visitor methods by the names of its nodes.

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

__all__ = ["Generation", "Rewriter"]


class Rewriter(NodeTransformer):
    """Sends what Jinja would do natively through the environment's charging filters."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        # As constants, literal text passes through `finalize`: charged each time it is written.
        node.nodes = [
            nodes.Const(child.data) if isinstance(child, nodes.TemplateData) else child
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if node.ctx == "load" else node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made")

    visit_List = visit_Dict = visit_Compare = visit_Test = _made


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text in some templates."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
