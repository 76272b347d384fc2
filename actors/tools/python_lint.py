"""What is plainly wrong with one Python file, found without running any of it. Standard library only, pure.

Run by `helper_worker.py` in a process of its own: compiling hostile text can exhaust the C stack. Reports syntax
errors, the compiler's warnings, names that nothing defines, and imports that nothing uses. It never guesses: a file
that imports `*` or catches NameError is not checked for names.
"""

import ast
import builtins
import symtable
import warnings
from collections.abc import Iterator

Finding = tuple[int, str]

MODULE_NAMES = frozenset(
    f"__{name}__"
    for name in (
        *("file", "name", "doc", "path", "spec", "package", "loader", "builtins"),
        *("class", "annotations", "debug", "module", "qualname", "dict"),
    )
)
BUILTIN_NAMES = frozenset(dir(builtins))


def lint(source: bytes, is_package: bool) -> list[Finding]:
    """Findings as (line from 1, message), in line order. `is_package`: an `__init__.py`, whose imports are exports."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tree = ast.parse(source, "<file>")
            compile(tree, "<file>", "exec", dont_inherit=True)
            table = symtable.symtable(_text(source), "<file>", "exec")
        except SyntaxError as error:
            return [(error.lineno or 1, f"syntax error: {error.msg}")]
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            return [(1, f"can't be compiled: {type(error).__name__}: {error}")]
    findings = [(warning.lineno, str(warning.message)) for warning in caught]
    if not _checks_names(tree):
        return sorted(set(findings))
    findings += _undefined(tree, table)
    if not is_package:
        findings += _unused_imports(tree, table)
    return sorted(set(findings))


def _text(source: bytes) -> str:
    import io
    import tokenize

    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding)


def _checks_names(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return False
        if isinstance(node, ast.Name) and node.id in ("NameError", "globals", "exec"):
            return False
    return True


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace() or symbol.is_parameter()


def _undefined(tree: ast.Module, top: symtable.SymbolTable) -> list[Finding]:
    known = {symbol.get_name() for symbol in top.get_symbols() if _binds(symbol)} | MODULE_NAMES | BUILTIN_NAMES
    for table in _tables(top):
        known |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    unknown = {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.get_name() not in known and (table is top or symbol.is_global())
    }
    reported: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in unknown:
            reported[node.id] = min(node.lineno, reported.get(node.id, node.lineno))
    return [(line, f"undefined name {name!r}") for name, line in reported.items()]


def _unused_imports(tree: ast.Module, top: symtable.SymbolTable) -> list[Finding]:
    used = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for table in _tables(top):
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    findings = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                if name not in used and alias.asname != alias.name:
                    findings.append((node.lineno, f"{name!r} imported but unused"))
    return findings
