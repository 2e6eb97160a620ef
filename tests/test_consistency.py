"""Five scripts, one house: the same headings, the same words, the same copies, nothing too long."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from common import envs

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(p.stem for p in ROOT.glob("*.py"))
COMMON = sorted(ROOT.glob("common/**/*.py"))
MATHS = ("compute_gae", "ppo_loss", "sac_loss")
NETWORKS = ("Agent", "Actor", "Critic")
STAGES = ["setup", "storage", "hot path", "train", "log and save"]
# rl_games' keys, which stand in one table of the README only
FOREIGN = """
    horizon_length e_clip mini_epochs minibatch_size num_actors critic_coef entropy_coef normalize_input
    normalize_value normalize_advantage normalise_input value_bootstrap truncate_grads lr_threshold bounds_loss_coeff
    clip_value max_epochs reward_shaper central_value_config mixed_precision truncated_values seq_len mini_batch
""".split()


def tree(path: str | Path) -> ast.Module:
    return ast.parse(Path(path).read_text())


def script(name: str) -> ast.Module:
    return tree(ROOT / f"{name}.py")


def functions(node: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]


def length(node: ast.FunctionDef) -> int:
    return node.end_lineno - node.lineno + 1


def definitions(module: ast.Module) -> dict[str, ast.AST]:
    return {n.name: n for n in module.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def test_there_are_scripts():
    assert "ppo_continuous" in SCRIPTS and len(COMMON) > 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_sections_are_in_order(name):
    """DESIGN section 3."""
    module = script(name)
    body = module.body
    doc = ast.get_docstring(module)
    assert doc and f"python {name}.py" in doc and "torchrun" in doc and "Shapes:" in doc and "https://" in doc
    kinds = []
    for node in body[1:]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kinds.append("import")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            kinds.append("constant")
        elif isinstance(node, ast.If):
            kinds.append("guard")
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            kinds.append(node.name)
        else:
            raise AssertionError(f"line {node.lineno}: import time does nothing but define")
    first = [kinds.index("import"), kinds.index("constant"), kinds.index("Args")]
    first += [kinds.index(next(k for k in kinds if k in NETWORKS)), kinds.index(next(k for k in kinds if k in MATHS))]
    first += [kinds.index("evaluate"), kinds.index("main"), kinds.index("guard")]
    assert first == sorted(first), kinds
    assert kinds.count("guard") == 1 and kinds[-1] == "guard" and kinds[-2] == "main"
    last_import, args = len(kinds) - 1 - kinds[::-1].index("import"), kinds.index("Args")
    assert kinds[: last_import + 1] == ["import"] * (last_import + 1)
    assert kinds[last_import + 1 : args] == ["constant"] * (args - last_import - 1)
    source = (ROOT / f"{name}.py").read_text().splitlines()
    main = definitions(module)["main"]
    lines = source[main.lineno - 1 : main.end_lineno]
    stages = [m[1] for m in (re.match(r" +# ---- ([\w ]+?)(:.*)? ----", line) for line in lines) if m]
    assert stages == STAGES
    assert lines[0].startswith("def main(args: Args) -> dict[str, float]:")


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_too_long(name):
    """DESIGN section 3: a feature that does not fit belongs in another script or nowhere."""
    module = script(name)
    main = definitions(module)["main"]
    long = {f.name: length(f) for f in functions(module) if length(f) > 40 and f.name not in ("main", "__post_init__")}
    assert not long
    assert length(main) <= 190
    assert all(len(line) <= 120 for line in (ROOT / f"{name}.py").read_text().splitlines())


@pytest.mark.parametrize("path", COMMON, ids=[str(p.relative_to(ROOT)) for p in COMMON])
def test_no_function_in_common_is_too_long(path):
    assert not {f.name: length(f) for f in functions(tree(path)) if length(f) > 40}


def test_common_without_envs_is_small():
    assert sum(len(p.read_text().splitlines()) for p in ROOT.glob("common/*.py")) <= 975


def depth(node: ast.AST) -> int:
    """Of loops, branches and with-blocks inside each other; an elif is no deeper than its if."""
    nested = isinstance(node, (ast.For, ast.While, ast.If, ast.With))
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        rest = depth(node.orelse[0])
        return max(1 + max(map(depth, node.body)), rest)
    return nested + max((depth(child) for child in ast.iter_child_nodes(node)), default=0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_main_is_not_nested_too_deep(name):
    assert depth(definitions(script(name))["main"]) <= 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_args(name):
    """Flat and frozen, grouped, truthfully typed, a docstring under every field."""
    args = importlib.import_module(name).Args
    assert args.__dataclass_params__.frozen and args.__mro__[1:] == (object,)
    body, fields = definitions(script(name))["Args"].body, dataclasses.fields(args)
    for i, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            after = body[i + 1]
            assert isinstance(after, ast.Expr) and isinstance(after.value.value, str), node.target.id
            assert not re.search(r"defaults? to|by default|\bdefault[:=]", after.value.value), node.target.id
    assert len(fields) <= 70
    source = ast.get_source_segment((ROOT / f"{name}.py").read_text(), definitions(script(name))["Args"])
    assert len(re.findall(r"^    # ---- .+ ----$", source, re.M)) >= 4


def test_copies_are_equal():
    """What any two scripts have by the same name is the same text, but for what must differ by its nature."""
    own = {"main", "Args", "play", "evaluate", "agent_kwargs", "load_agent", "Trunk", *NETWORKS, *MATHS} - {
        "compute_gae"
    }
    own |= {"SCRIPT", "METRICS", "NETWORK_ARGS"}
    first = {}
    for name in SCRIPTS:
        module = script(name)
        constants = {ast.unparse(n.targets[0]): n.value for n in module.body if isinstance(n, ast.Assign)}
        for key, node in (definitions(module) | constants).items():
            if key not in own:
                text, where = first.setdefault(key, (ast.dump(node), name))
                assert ast.dump(node) == text, f"{key} of {name} and of {where}"


def test_fields_of_the_same_name_are_of_the_same_type_and_meaning():
    seen = {}
    for name in SCRIPTS:
        body = definitions(script(name))["Args"].body
        for node, doc in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                what = ast.unparse(node.annotation), doc.value.value
                assert seen.setdefault(node.target.id, what) == what, f"{name}.{node.target.id}"


@pytest.mark.parametrize("path", [*ROOT.glob("*.py"), *COMMON,
                                  *(p for p in ROOT.glob("tests/*.py") if p.name != Path(__file__).name)],
                         ids=lambda p: str(p.relative_to(ROOT)))  # fmt: skip
def test_no_foreign_vocabulary(path):
    found = set(re.findall(r"\w+", path.read_text())) & set(FOREIGN)
    assert not found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_nobody_imports_a_script():
    for path in [*COMMON, *(ROOT / f"{name}.py" for name in SCRIPTS)]:
        assert not imports(path) & set(SCRIPTS), path


def test_common_takes_no_args_object_from_a_script():
    """Only what checks or parses Args, by field name, may see it."""
    for path in COMMON:
        if path.name not in ("cli.py", "errors.py", "checkpoint.py", "logger.py", "run.py"):
            for function in functions(tree(path)):
                assert "args" not in [a.arg for a in function.args.args], f"{path}: {function.name}"


def test_no_script_knows_an_environment_by_name():
    for name in SCRIPTS:
        for node in ast.walk(script(name)):
            if isinstance(node, ast.Compare):
                assert "env_id" not in ast.unparse(node), f"{name}.py line {node.lineno}"


def test_readme_names_every_prefix_and_script():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    text = readme.read_text()
    assert [b for b in envs.BACKENDS if f"{b}/" not in text] == []
    assert [name for name in SCRIPTS if f"{name}.py" not in text] == []
    assert "pytest" in text and "--resume" in text
