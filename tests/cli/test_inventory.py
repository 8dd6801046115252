"""Nothing that fldiag offered is lost, but for what goes: verbs, options, Python names, config keys, rows of the ledger, hashes.

``tests/fixtures/inventory.json`` is the inventory of 25 November 2026. Anything may join, and an option may get a further name.
``python tests/inventory.py`` writes the file anew: after a release, or when something new is meant to stay.
"""

import copy
import json
from collections import Counter

import inventory
import pytest

THEN = json.loads(inventory.FILE.read_text())
#: What goes -> what to use instead (CHANGELOG.md says it to users). A verb goes with its options, a diagnostic with its.
GOES = {
    "fldiag.registry.diagnostic(needs)": 'on="clients"',
    "fldiag.registry.diagnostic(choose)": 'a list of Problem: on="checkpoints", or an option with json_schema_extra={"joint": [...]}',
    "fldiag.registry.diagnostic(variant)": "an option of text that is not its default",
    "fldiag basins": "fldiag spectrum or fldiag profile",
    "diagnostics basins": "spectrum or profile",
    "fldiag client-floor": "fldiag drift",
    "diagnostics client-floor": "drift",
    "fldiag trace": "fldiag spectrum --trace, or fldiag diagnose trace",
    "fldiag diagonal": "fldiag spectrum --diagonal, or fldiag diagnose diagonal",
    "fldiag density": "fldiag spectrum --density, or fldiag diagnose density",
    "fldiag account": "fldiag forgetting --why, or fldiag diagnose account",
    "fldiag landscape --line": "fldiag profile",
    "diagnostics landscape.line": "profile",
    "fldiag landscape --overlay": "fldiag landscape A B, which draws both on one scale",
    "diagnostics landscape.overlay": "several targets",
    "fldiag landscape --merge-tree": "Landscaper",
    "diagnostics landscape.merge_tree": "Landscaper",
    "fldiag landscape --bf16": "fldiag landscape without it",
    "diagnostics landscape.bf16": "float32",
    "diagnostics connectivity.store": "cache, in which everything unfinished is kept",
    "diagnostics flatness.store": "cache, in which everything unfinished is kept",
    "diagnostics profile.store": "cache, in which everything unfinished is kept",
    "diagnostics landscape.frame": "directions of the weights themselves",
    "diagnostics forgetting.store": "cache, which keeps finished rounds of every diagnostic",
    "fldiag.History.sampled": "len(history.last().ids)",
    "fldiag.Problem.hessian(form)": "hessian(), which chooses",
    "fldiag.registry.diagnostic(cost)": "nothing: a progress bar forecasts from the first part on",
    "fldiag.Recorder.flush": "nothing: a round is on the disk when round() returns",
    "fldiag.registry.diagnostic(cheap)": "numbers with a column, whose tables report --compute makes",
    "fldiag.registry.diagnostic(order)": "nothing: alarms, then numbers, then weights before runs",
    "fldiag.registry.diagnostic(section)": "draw and summary, which the report shows",
    "fldiag.registry.diagnostic(more)": "draw={ending: function}",
    "fldiag.registry.diagnostic(pictured)": "Field(json_schema_extra={'drawing': True}) of the option",
    "fldiag.registry.diagnostic(also)": "flags",
    "fldiag.registry.diagnostic(strict)": "fails",
    "fldiag.registry.diagnostic(parts)": "nothing: workspace().map splits what it maps",
    "fldiag.registry.diagnostic(check)": "raise FldiagError first thing",
    "diagnostics landscape.store": "cache, which keeps finished parts",
    "diagnostics leave-one-out.store": "cache, which keeps finished parts",
    "diagnostics leave-one-out.executor": "executor, which all diagnostics share",
    "diagnostics personalise.store": "cache, which keeps finished parts",
    "diagnostics personalise.executor": "executor, which all diagnostics share",
}
#: What a value may be instead without refusing what was accepted: a choice is a text that is checked sooner.
ALSO = {
    "integer": {"float", "text"},
    "text": {"choice", "path"},
    "path": {"text"},
    "boolean": set(),
    "float": {"text"},
}
REMEDY = "restore it, or name it in GOES with what to use instead"


def find_lost(names, now, prefix=""):
    """Complaints about what is no more and does not go."""
    return [
        f"{prefix}{name} is gone; {REMEDY}"
        for name in names
        if name not in now and prefix + name not in GOES
    ]


def lost_options(then, now):
    """Complaints about verbs."""
    complaints = find_lost(then, now, "fldiag ")
    for verb in sorted(set(then) & set(now)):
        options = {
            name: p
            for p in of_kind(now[verb], "option")
            for name in (*p["names"], *p.get("off", ()))
        }
        for old in of_kind(then[verb], "option"):
            spellings = [*old["names"], *old.get("off", ())]
            missing = find_lost(spellings, options, f"fldiag {verb} ")
            complaints += missing
            if not missing and spellings[0] in options:
                complaints += changed_values(
                    f"fldiag {verb} {spellings[0]}", old, options[spellings[0]]
                )
        old, new = (of_kind(parameters[verb], "argument") for parameters in (then, now))
        complaints += [
            f"fldiag {verb}: argument {p['names'][0]} is gone; {REMEDY}" for p in old[len(new) :]
        ]
        complaints += [
            f"fldiag {verb}: argument {p['names'][0]} is new and required"
            for p in new[len(old) :]
            if p.get("required")
        ]
        complaints += [
            c
            for a, b in zip(old, new, strict=False)
            for c in changed_values(f"fldiag {verb} {a['names'][0]}", a, b)
        ]
    return complaints


def of_kind(parameters, kind):
    return [p for p in parameters if p.get("kind", "option") == kind]


def changed_values(name, then, now):
    """Complaints where what was typed is no longer understood, or means something else when it is not typed."""
    complaints = []
    if now["type"] not in {then["type"], *ALSO.get(then["type"], set())}:
        complaints.append(f"{name} takes {now['type']} where it took {then['type']}")
    if any(now.get(key, False) != then.get(key, False) for key in ("flag", "multiple")):
        complaints.append(f"{name} is given in another way")
    several = {-1} if then.get("kind") == "argument" else set()  # several where one was accepted
    if now.get("nargs") not in {then.get("nargs"), *several}:
        complaints.append(f"{name} takes another number of values")
    defaults = [
        p.get("default") or None if then.get("multiple") else p.get("default") for p in (then, now)
    ]
    if defaults[0] != defaults[1] and then["names"] != [
        "--seed"
    ]:  # no seed has been seed 0 all along
        complaints.append(f"{name} has the default {defaults[1]!r} where it had {defaults[0]!r}")
    if now.get("required") and not then.get("required"):
        complaints.append(f"{name} is required now")
    return complaints


def lost_names(then, now):
    """Complaints about Python names and their arguments."""
    complaints = find_lost(then, now)
    for name in sorted(set(then) & set(now)):
        old, new = then[name], now[name]
        if old is None or new is None:
            complaints += [] if old is None else [f"{name} can no longer be called"]
            continue
        stay = [a for a in old if f"{name}({a.rstrip('=')})" not in GOES]
        options = {a.rstrip("="): a.endswith("=") for a in new}
        complaints += [
            f"{name}({a.rstrip('=')}) is gone; {REMEDY}"
            for a in stay
            if a.rstrip("=") not in options and a != "*"
        ]
        complaints += [
            f"{name}({a.rstrip('=')}) has no default any more"
            for a in stay
            if a.endswith("=") and not options.get(a[:-1], True)
        ]
        former = {a.rstrip("=") for a in old}
        complaints += [
            f"{name}({a}) is new and required"
            for a in new
            if a not in former and not a.endswith("=") and not a.startswith("*")
        ]
        if positional(new)[: len(positional(stay))] != positional(stay):
            complaints.append(f"{name} has its positional arguments in another order")
    return complaints


def positional(names):
    """Those before the first keyword-only one."""
    return [
        a.rstrip("=")
        for a in names[: next((i for i, a in enumerate(names) if a.startswith("*")), len(names))]
    ]


def lost_entries(then, now):
    """Complaints about what is registered and its options."""
    complaints = []
    for kind, entries in then.items():
        complaints += find_lost(entries, now[kind], f"{kind} ")
        for name in set(entries) & set(now[kind]):
            complaints += find_lost(
                (f"{name}.{key}" for key in entries[name]),
                {f"{name}.{key}" for key in now[kind][name]},
                f"{kind} ",
            )
            complaints += other_values(f"{kind} {name}.", entries[name], now[kind][name])
            complaints += [
                f"{kind} {name}.{key} is new and required"
                for key in set(now[kind][name]) - set(entries[name])
                if now[kind][name][key] == "..."
            ]
    return sorted(complaints)


def other_values(prefix, then, now):
    return [
        f"{prefix}{key} is {now[key]!r} where it was {value!r}"
        for key, value in then.items()
        if key in now and now[key] != value
    ]


def lost_keys(then, now):
    """Complaints about keys of a config and their defaults."""
    flat = [
        {
            f"{section}.{key}": value
            for section, part in config.items()
            for key, value in (part.items() if isinstance(part, dict) else [("", part)])
        }
        for config in (then, now)
    ]
    return find_lost(flat[0], flat[1], "config ") + other_values("config ", *flat)


def lost_hashes(then, now):
    return find_lost(then, now, "hash of ") + other_values("hash of ", then, now)


def lost_presets(then, now):
    """Complaints about hashes of presets, but for FedSOL's: they have named the Lambda of its released code since. What hash
    they had without is in ``config_hashes.json``."""
    kept = {name: value for name, value in then.items() if not name.startswith("fedsol-")}
    return find_lost(then, now, "hash of ") + lost_hashes(kept, now)


#: What had rows of FedSOL trained with Lambda by layer, under the paper's protocol: they are in fedsol/strengths since.
BY_LAYER = ("table2", "table5", "fig10", "fedsol-head")


def lost_rows(then, now):
    """Complaints about rows of the ledger; one that was not measured may be by now."""
    rows = [Counter(inventory.leaves(branch)) for branch in (then, now)]
    lacking = rows[0] - rows[1]
    spare = Counter(row[:-1] for row in (rows[1] - rows[0]).elements())
    return [
        f"ledger: {' '.join(row)} is gone; {REMEDY}"
        for row in lacking.elements()
        if (row[-1] or not spare[row[:-1]])
        and not (row[1] in BY_LAYER and row[-1] == "paper" and row[-3] in ("fedsol", ""))
    ]


CHECKS = {
    "verbs": lost_options,
    "python": lost_names,
    "registered": lost_entries,
    "config": lost_keys,
    "ledger columns": lambda then, now: find_lost(then, now, "ledger column "),
    "ledger rows": lost_rows,
    "figures": lambda then, now: find_lost(then, now, "figure "),
    "preset hashes": lost_presets,
    "records": lost_hashes,
}


@pytest.fixture(scope="module")
def now():
    return json.loads(json.dumps(inventory.inventory()))


def test_the_inventory_is_complete():
    assert set(THEN) == set(CHECKS)
    assert {
        "train",
        "spectrum",
        "matching",
        "report",
        "toy",
        "toy plane",
        "toy iris",
        "sweep",
        "prune",
    } <= set(THEN["verbs"])
    assert (
        len(THEN["verbs"]) >= 38
        and sum(map(len, THEN["verbs"].values())) > 600
        and len(THEN["python"]) > 150
    )
    assert {"--set"} <= {name for p in THEN["verbs"]["train"] for name in p["names"]}
    assert (
        len(THEN["registered"]["methods"]) >= 40
        and len(THEN["preset hashes"]) >= 54
        and len(THEN["records"]) >= 12
    )
    assert len(inventory.leaves(THEN["ledger rows"])) > 1000


@pytest.mark.parametrize("part", CHECKS)
def test_nothing_is_lost(part, now):
    assert CHECKS[part](THEN[part], now[part]) == []


def test_records_state_the_hash_of_their_config():
    assert all(record["hash"] == record["stated"] for record in THEN["records"].values())


def test_what_goes_is_in_the_inventory():
    """So that no entry of GOES is misspelt, or stays there when the inventory is written anew."""
    names = {f"fldiag {verb}" for verb in THEN["verbs"]} | {
        f"fldiag {verb} {name}"
        for verb, parameters in THEN["verbs"].items()
        for p in parameters
        for name in (*p["names"], *p.get("off", ()))
    }
    names |= {
        *THEN["python"],
        *(
            f"{name}({a.rstrip('=')})"
            for name, signature in THEN["python"].items()
            for a in signature or ()
        ),
    }
    names |= {
        f"{kind} {path}"
        for kind, entries in THEN["registered"].items()
        for name, options in entries.items()
        for path in (name, *(f"{name}.{key}" for key in options))
    }
    assert set(GOES) <= names


def delete(*path):
    def change(tree):
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]

    return change


def set_value(value, *path):
    def change(tree):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("verbs", delete("prune"), "fldiag prune is gone"),
        ("verbs", delete("spectrum", 3), "fldiag spectrum --trace is gone"),
        ("verbs", delete("prune", 0), "argument run is gone"),
        (
            "verbs",
            set_value("integer", "spectrum", 2, "type"),
            "fldiag spectrum --which takes integer",
        ),
        ("verbs", set_value(7, "spectrum", 1, "default"), "fldiag spectrum --k has the default 7"),
        ("python", delete("fldiag.Part.send"), "fldiag.Part.send is gone"),
        ("python", delete("fldiag.train", 2), "fldiag.train(out) is gone"),
        ("python", set_value("out", "fldiag.train", 2), "fldiag.train(out) has no default"),
        (
            "python",
            set_value(["ax=", "table", "*", "name=", "width="], "fldiag.draw"),
            "another order",
        ),
        ("registered", delete("methods", "fedsol"), "methods fedsol is gone"),
        (
            "registered",
            delete("diagnostics", "landscape", "clip"),
            "diagnostics landscape.clip is gone",
        ),
        ("registered", set_value(9, "methods", "fedprox", "mu"), "methods fedprox.mu is 9"),
        ("config", delete("train", "lr"), "config train.lr is gone"),
        ("config", set_value(1, "seed"), "config seed. is 1"),
        ("ledger columns", delete(0), "ledger column kind is gone"),
        ("ledger rows", delete("fedalign", "table1"), "ledger: fedalign table1 "),
        ("preset hashes", set_value("0", "digits"), "hash of digits is '0'"),
        ("figures", delete(0), "is gone"),
    ],
)
def test_a_loss_is_seen(part, change, words):
    today = copy.deepcopy(THEN[part])
    change(today)
    assert any(words in complaint for complaint in CHECKS[part](THEN[part], today))
