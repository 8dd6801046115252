"""Names of participles and pronouns: their number in fldiag may only fall."""

import ast
from pathlib import Path

import fldiag

#: Words that do not say what a value is.
VAGUE = """
found made given asked told kept there said whole own held known seen here them some many few taken put gone meant shown
its their those these what where whose others another further again much more less enough stored wanted chosen every
drawn named settled used needed written
"""
#: How many such names are left. Lower it with them.
LEFT = 14


def vague_names(tree: ast.Module) -> int:
    """Functions, arguments, variables, attributes and fields with such a name, counted once in each function or class."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = {
                child
                for function in ast.walk(node)
                if function is not node and isinstance(function, ast.FunctionDef | ast.Lambda)
                for child in ast.walk(function)
            }
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            names = {argument.arg for argument in arguments}
            for child in ast.walk(node):
                if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
                    if isinstance(child, ast.Attribute):
                        names.add(child.attr.strip("_"))
                    elif child not in inner:
                        names.add(child.id)
            count += (node.name.strip("_") in VAGUE.split()) + len(names & set(VAGUE.split()))
        if isinstance(node, ast.ClassDef):
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            count += sum(getattr(field, "id", "").strip("_") in VAGUE.split() for field in fields)
    return count


def test_vague_names_are_counted_where_they_stand():
    source = """
class Table:
    rows: list
    found: list

    def read(self, given, path):
        made, rows = given, path
        self._kept = lambda told: told
        return made
"""
    assert (
        vague_names(ast.parse(source)) == 4
    )  # found, given, made, kept; not an argument of a lambda


def test_vague_names_become_fewer():
    files = Path(fldiag.__file__).parent.rglob("*.py")
    count = sum(vague_names(ast.parse(path.read_text("utf-8"))) for path in files)
    assert count <= LEFT, "name what the value is; see CONTRIBUTING, Style"
    assert count == LEFT, f"fewer than before: set LEFT to {count}"
