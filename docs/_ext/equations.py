"""Equations of docstrings, which are plain text, as LaTeX; and LaTeX as MathML, which browsers draw without any script.

A docstring's equations are written for a terminal: ``g_u = grad L_l(w_k + e),  e = rho g_l / ||g_l||``. ``typeset`` finds the
stretches of a line that are equations and leaves its words alone.
"""

from __future__ import annotations

import re
from itertools import pairwise

GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "eps",
    "kappa",
    "lam",
    "lambda",
    "mu",
    "omega",
    "phi",
    "pi",
    "rho",
    "sigma",
    "tau",
    "theta",
    "xi",
    "Delta",
    "Lambda",
    "Sigma",
}
LETTERS = {
    "eps": r"\epsilon",
    "lam": r"\lambda",
    "grad": r"\nabla",
    "zbar": r"\bar z",
    "mubar": r"\bar\mu",
    "gt": r"\tilde g",
    "zg": "{z_g}",
    "zp": "{z_p}",
    "sum": r"\sum",
    "sqrt": r"\sqrt{}",
    "inf": r"\infty",
    "int": r"\int",
}
WORDS = {
    "softmax",
    "mean",
    "argmax",
    "argmin",
    "KL",
    "CE",
    "Var",
    "relu",
    "sign",
    "exp",
    "log",
    "cos",
    "max",
    "min",
    "pool",
    "ceil",
    "body",
    "lr",
    "wd",
    "tr",
    "diag",
    "sharp",
    "HW",
    "Beta",
}
RELATIONS = {
    "=": "=",
    ":=": r"\leftarrow",
    "~": r"\sim",
    "<": "<",
    ">": ">",
    "<=": r"\le",
    ">=": r"\ge",
    "in": r"\in",
    "->": r"\to",
}
SIGNS = {
    ";": ";",
    "*": r"\cdot ",
    "^": "^",
    "+": "+",
    "-": "-",
    "/": "/",
    "(": "(",
    ")": ")",
    "[": "[",
    "]": "]",
    "{": r"\{",
    "}": r"\}",
    ",": ",",
    "..": r"\ldots",
    "'": "'",
    "!": "!",
    "+-": r"\pm ",
}
#: Code, quoted values, space, signs of two characters, names with subscripts (or dots), numbers, and any other character.
TOKEN = re.compile(
    r"``[^`]*``|\"[^\"]*\"|\s+|//|\|\||:=|<=|>=|->|\.\.|\+-"
    r"|[A-Za-z~]+(?:[0-9]+(?![A-Za-z0-9.]))?~?(?:_[A-Za-z0-9,]*[A-Za-z0-9]|_\{[^}]*\})*(?:\.[a-z_]+)*"
    r"|\d+(?:\.\d+)?(?:e-?\d+)?(?:\s?%)?|.",
    re.DOTALL,
)


def symbol(name: str) -> str | None:
    """An identifier as LaTeX; None for a word."""
    if "." in name.partition("{")[0]:
        return None
    base, _, sub = name.partition("_")
    digits = re.fullmatch(r"([A-Za-z]+?)(\d+)", base)
    if digits and not sub:
        base, sub = digits[1], digits[2]
    tilde = base.endswith("~")
    base = base.rstrip("~")
    if base in GREEK or base in LETTERS:
        text = LETTERS.get(base, "\\" + base)
    elif len(base) == 1 and base.isalpha():
        text = base
    elif base in WORDS and (len(sub) <= 3 or "{" in sub):
        text = rf"\operatorname{{{base}}}"
    elif sub.startswith("{"):
        text = rf"\mathrm{{{base}}}"
    elif sub:  # an option's name: server_lr
        return rf"\mathrm{{{name}}}".replace("_", r"\_")
    else:
        return None
    text = rf"\tilde {text}" if tilde else text
    return text + (f"_{{{_subscript(sub)}}}" if sub else "")


def _subscript(text: str) -> str:
    words = {"in": r"\in ", "=": "=", ":": ":", "..": r"\ldots ", "not": r"\neg ", ",": ","}
    parts = [
        words.get(p)
        or symbol(p)
        or (rf"\mathrm{{{p}}}".replace("_", r"\_") if p[0].isalpha() else p)
        for p in re.findall(r"[A-Za-z][A-Za-z0-9_]*|\d+|\.\.|[=:,]", text)
    ]
    return " ".join(parts)


def typeset(line: str) -> str:
    """A line of markdown: equations between dollars, options and quoted values as code, words as they are."""
    tokens = TOKEN.findall(line)
    found, i = [], 0
    while i < len(tokens):
        j = _run(tokens, i)
        if j > i:
            found.append(f"${_latex(tokens[i:j])}$")
            i = j
        else:
            found.append(_plain(tokens[i]))
            i += 1
    return "".join(found)


def _run(tokens: list[str], start: int) -> int:
    """Where the equation that begins here ends; ``start`` where none does."""
    if tokens[start].isspace() or tokens[start] in (")", ",", "-", "/", "]", "}", "=", "+"):
        return start
    end, relations, symbols, i = start, 0, 0, start
    depth = 0
    while i < len(tokens):
        t = tokens[i]
        if t.isspace():
            if len(t) > 1 and depth == 0 and i > start and tokens[i - 1] in ",;":
                break
        elif t in RELATIONS and t != "in":
            relations += 1
        elif t in SIGNS or t in ("||", "|"):
            depth += t in "([{" if t != "||" else 0
            depth -= t in ")]}" if t != "||" else 0
            if depth < 0 or (t in ",;" and depth == 0 and _inner(tokens, start, i) == 0):
                break
        elif t[0].isdigit():
            pass
        elif t[0].isalpha() and symbol(t) is not None and not _article(tokens, i):
            symbols += 1
        else:
            break
        if (
            depth == 0
            and not t.isspace()
            and (t not in SIGNS or t in ")]}'!")
            and (t not in RELATIONS or t == ">")
        ):
            end = i + 1
        i += 1
    inside = tokens[start:end]
    whole = (
        any(t in RELATIONS for t in inside if t != "in")
        or any(t in ("||", "/", "^", "*") for t in inside)
        or any(a[0].isalpha() and b == "(" for a, b in pairwise(inside))
        or "grad" in inside
        or ("+" in inside and symbols > 1)
    )
    return (
        end
        if whole
        and relations + symbols > 0
        and any(t[0].isalpha() for t in inside)
        and _even(inside)
        else start
    )


def _inner(tokens: list[str], start: int, at: int) -> int:
    """Angle brackets open at a place: <a, b> is an inner product, and its comma is no end."""
    opened = 0
    for k in range(start, at):
        opened += tokens[k] == "<" and k + 1 < len(tokens) and not tokens[k + 1].isspace()
        opened -= tokens[k] == ">" and k > start and not tokens[k - 1].isspace()
    return opened


def _even(tokens: list[str]) -> bool:
    return sum(t == "||" for t in tokens if t) % 2 == 0 or any(
        a.isspace() and b == "||" for a, b in pairwise(tokens)
    )


def _article(tokens: list[str], i: int) -> bool:
    """``a`` before a word is the article."""
    return (
        tokens[i] in ("a", "A")
        and i + 2 < len(tokens)
        and tokens[i + 1].isspace()
        and tokens[i + 2][:1].isalpha()
        and symbol(tokens[i + 2]) is None
    )


def _latex(tokens: list[str]) -> str:
    found: list[str] = []
    raw: list[int] = []  # braces that belong to a power
    for i, t in enumerate(tokens):
        before, after = tokens[i - 1] if i else " ", tokens[i + 1] if i + 1 < len(tokens) else " "
        if t.isspace():
            close = before[-1:].isalnum() or before in ")}"
            found.append(
                r"\; "
                if before in RELATIONS or after in RELATIONS
                else r"\, "
                if close and (after[:1].isalnum() or after[0] in "(|")
                else " "
            )
        elif t == "||":
            if before.isspace() and after.isspace():
                found.append(r"\parallel ")  # the two sides of a divergence
            else:
                found.append(r"\Vert ")
        elif t == "<" and not after.isspace():
            found.append(r"\langle ")
        elif t == ">" and not before.isspace():
            found.append(r"\rangle ")
        elif t in RELATIONS:
            found.append(RELATIONS[t])
        elif t == "^":
            found.append("^")
        elif t == "{" and before == "^":
            raw.append(len(found))
            found.append("{")
        elif t == "}" and raw:
            raw.pop()
            found.append("}")
        elif t in SIGNS:
            found.append(SIGNS[t])
        elif power := re.fullmatch(r"(\d+(?:\.\d+)?)e(-?\d+)", t):
            found.append(("" if power[1] == "1" else power[1] + r"\cdot ") + f"10^{{{power[2]}}}")
        elif before == "^" and t[0].isalnum():
            found.append(f"{{{symbol(t) or t}}}")
        else:
            found.append((symbol(t) if t[0].isalpha() else t.replace("%", r"\%")) or t)
    return re.sub(r"\^([+-])", r"^{\1}", "".join(found))


def _plain(token: str) -> str:
    if token.startswith("``"):
        return token.replace("``", "`")
    if token.startswith('"') or re.fullmatch(r"[a-z]+(\.[a-z_]+)+|[a-z]+_[a-z_]+", token):
        return f"`{token}`"
    return re.sub(r"([\\`*_<>\[\]$|#])", r"\\\1", token)


def setup(app: object) -> dict[str, bool]:
    """Math nodes become MathML."""
    from latex2mathml.converter import convert

    def inline(self: object, node: object) -> None:
        from docutils import nodes

        self.body.append(convert(node.astext()))  # type: ignore[attr-defined]
        raise nodes.SkipNode

    def block(self: object, node: object) -> None:
        from docutils import nodes

        self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')  # type: ignore[attr-defined]
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
