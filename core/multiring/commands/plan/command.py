"""`multiring plan`: prints, draws and predicts the plan of a collective on a described cluster."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

from multiring import _core as native
from multiring import config, units
from multiring.commands.argument_types import number_of
from multiring.commands.plan.drawing import draw
from multiring.commands.plan.explain import rows_as_json, rows_as_text
from multiring.commands.plan.report import Collective, Prediction, as_json, as_text, described_as_json
from multiring.errors import UsageError

__all__ = ["add_arguments", "main"]

# Every transfer of every candidate is counted, and what every rank sends in an exchange, so that more would
# take minutes.
_MAX_RANKS = 1 << 12

# Sums over all ranks have to fit into 64 bits.
_MAX_BYTES = 1 << 45

# Algorithms that are no plan, so the table has all that there is to say.
_WITHOUT_PLAN = ("rounds", "messages", "direct", "staged")
_WITHIN_HOST = ("direct", "staged")
# A reduce-scatter by the plan of an allreduce: the table has it, too.
_ALLREDUCE_OF = "allreduce:"
# The options that say what is between several hosts, or how plans cross it.
_OF_SEVERAL_HOSTS: dict[str, object] = {
    "placement": "blocks",
    "rate": (units.rate("10gbit"),),
    "interfaces": None,
    "latency": 20e-6,
    "links": (),
    "host_links": "switch",
    "segment": 0,
}
_ASSUMED_HOSTS = 2
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring plan`."""
    parser.epilog = (
        "Nothing is measured or sent: the cluster is the one that the options describe.\n\n"
        "  multiring plan --ranks-per-host 4 --hosts 8 --bytes 100M --rate 10gbit\n"
        "  multiring plan --hosts 2x4 --bytes 4K\n"
        "  multiring plan --hosts 2+1+2 --bytes 4K --explain\n"
        "  multiring plan --ranks-per-host 4 --hosts 16 --mode 4x8x2 --links 10gbit:20us,2.5gbit:100us"
    )
    _add_cluster_arguments(parser)
    _add_plan_arguments(parser)
    parser.add_argument(
        "--explain", action="store_true", help="list all algorithms, their costs, and why others do not run"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with every group of ranks"
    )


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--hosts",
        "--layout",
        type=_layout,
        metavar="N",
        help="number of hosts, hosts and ranks on each as 2x4, or the ranks of each as 1+3 or 2+1+2 [2]",
    )
    cluster.add_argument(
        "--ranks-per-host", type=number_of("ranks"), metavar="N", help="ranks on every host [1]"
    )
    cluster.add_argument(
        "--placement",
        choices=("blocks", "round-robin"),
        default=_OF_SEVERAL_HOSTS["placement"],
        help="whether a host has consecutive ranks, or ranks are dealt to the hosts in turn [blocks]",
    )
    cluster.add_argument(
        "--rate",
        type=_rates,
        default=_OF_SEVERAL_HOSTS["rate"],
        metavar="R",
        help="speed of an interface, or of each of several with commas: 500mbit,125mbit [10gbit]",
    )
    cluster.add_argument(
        "--interfaces",
        type=number_of("interfaces"),
        metavar="N",
        help="interfaces of a host, all at --rate [1]",
    )
    cluster.add_argument(
        "--latency",
        type=units.seconds,
        default=_OF_SEVERAL_HOSTS["latency"],
        metavar="T",
        help="from host to host, with unit [20us]",
    )
    cluster.add_argument(
        "--links",
        type=_links,
        default=_OF_SEVERAL_HOSTS["links"],
        metavar="R:T,...",
        help="rate and latency of a host in each dimension across hosts, if not those of its interfaces",
    )
    cluster.add_argument(
        "--host-links",
        choices=("switch", "ring", "line"),
        default=_OF_SEVERAL_HOSTS["host_links"],
        help="whether each host has a link to each, or to its neighbours only [switch]",
    )
    cluster.add_argument(
        "--memory-rate",
        type=units.size,
        metavar="B",
        help="bytes per second that all ranks of a host together read and write [20000000000; of one host "
        "alone, where arrays are in caches, 60000000000]",
    )
    cluster.add_argument(
        "--oversubscribed", action="store_true", help="the ranks outnumber the cores of the one host"
    )


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--bytes",
        dest="nbytes",
        type=units.size,
        default=100 << 20,
        metavar="B",
        help="bytes of the array: 4096, 64K, 100M (factors of 1024) [100M]",
    )
    plan.add_argument(
        "--collective",
        choices=native.collective_names(),
        default="allreduce",
        help="what runs; of an allgather or a gather --bytes are those of each rank [allreduce]",
    )
    plan.add_argument("--dtype", choices=_DTYPES, default="float32", help="type of the elements [float32]")
    plan.add_argument(
        "--mode",
        default="",
        metavar="M",
        help="ranks within a host x near hosts x far hosts ...; a letter after a number forces an algorithm: "
        f"{native.algorithm_letters()}, as 4x8x2 or 4tx16d; or rounds, or messages; on one host "
        "direct, staged or rounds [automatic]",
    )
    plan.add_argument(
        "--segment",
        type=units.size,
        default=_OF_SEVERAL_HOSTS["segment"],
        metavar="B",
        help="bytes of the array that pass at once [automatic]",
    )
    plan.add_argument(
        "--order",
        choices=("canonical", "any"),
        default="canonical",
        help="canonical: the same bits wherever ranks are placed; any: rings may run [canonical]",
    )
    plan.add_argument(
        "--nccl",
        choices=("off", "host", "hierarchical", "all"),
        help="the job's MULTIRING_NCCL: on several hosts, what runs for arrays on GPUs is told, too "
        "[MULTIRING_NCCL]",
    )


def main(args: argparse.Namespace) -> int:
    """Prints what a job would run. Raises UsageError for a mode that does not fit the cluster."""
    if args.hosts is None:
        args.hosts = _ASSUMED_HOSTS
        if args.ranks_per_host is None and not args.json:
            assumed = f"multiring plan: {_ASSUMED_HOSTS} hosts of 1 rank are assumed; --hosts 4x8 names yours"
            print(assumed, file=sys.stderr)
    collective, request, model = _described(args)
    if len(collective.cluster.ranks) == 1:
        _refuse_what_needs_hosts(args)
    has_plan = not _is_listed_only(args.mode) and native.has_plans(args.collective)
    row, plan = None, None
    if has_plan and len(collective.cluster.ranks) > 1:
        row, plan = native.choose_algorithm(collective.cluster, request, model)
    rows = [row] if row and not args.explain else _rows(args, collective, request, model)
    row = row or rows[0]
    on_devices = _on_devices(args, collective, request)
    rows += on_devices
    _refuse_what_no_plan_uses(args, row, plan)
    prediction = _prediction(collective, row, plan, model) if plan else None
    if args.json:
        found = as_json(prediction) if prediction else described_as_json(collective, row)
        print(json.dumps(found | {"algorithms": rows_as_json(rows)}, indent=2))
    elif prediction is None or args.explain:
        print(rows_as_text(collective, rows))
    else:
        lines = [as_text(prediction), *(f"{each.name:<10} {each.excluded}" for each in on_devices)]
        print("\n".join(lines), draw(collective.cluster.ranks, prediction.plan), sep="\n\n")
    return 0


def _nccl(args: argparse.Namespace) -> str | None:
    """Of the job; None: nobody has said."""
    return args.nccl or _variable("MULTIRING_NCCL")


def _variable(name: str) -> str | None:
    """What a variable of the job says; none of the others is looked at."""
    values = list(config.check({name: os.environ.get(name, "")}).values())
    return str(values[0]) if values else None


def _on_devices(
    args: argparse.Namespace, collective: Collective, request: native.PlanRequest
) -> list[native.AlgorithmRow]:
    """What runs for arrays on devices of several hosts, if asked for; the table of one host has it."""
    if len(collective.cluster.ranks) == 1 or _nccl(args) is None:
        return []
    is_rounded = _variable("MULTIRING_COMM_DTYPE") not in (None, "float32")
    return [native.device_row(collective.cluster, request, bool(args.mode), is_rounded)]


def _refuse_what_needs_hosts(args: argparse.Namespace) -> None:
    for name, default in _OF_SEVERAL_HOSTS.items():
        if getattr(args, name) != default:
            _refuse(f"--{name.replace('_', '-')} is for several hosts; the ranks of one share memory")


def _refuse_what_no_plan_uses(
    args: argparse.Namespace, row: native.AlgorithmRow, plan: native.Plan | None
) -> None:
    across = plan.mode.count("x") if plan else 1
    if args.segment and not plan:
        _refuse(f"--segment is for plans, and {row.name} is none: name one by --mode, or leave --segment out")
    if len(args.links) > across:
        crosses = (
            f"mode {plan.mode} has {across} across hosts: name the dimensions by --mode"
            if plan
            else f"{row.name} crosses hosts in one dimension"
        )
        _refuse(f"--links has {len(args.links)} links, but {crosses}")


def _described(args: argparse.Namespace) -> tuple[Collective, native.PlanRequest, native.CostModel]:
    """What the options describe, and the same for the core."""
    interfaces = [native.Interface(rate, args.latency) for rate in _interface_rates(args)]
    ranks_of_hosts = _ranks_of_hosts(args)
    if args.oversubscribed and len(ranks_of_hosts) > 1:
        _refuse("--oversubscribed is for one host; across hosts the network decides")
    memory = {}
    if len(ranks_of_hosts) == 1:
        assumed = native.assumed_memory(ranks_of_hosts[0], args.oversubscribed)
        memory = dict(zip(("memory_rate", "memory_latency", "memory_rewriting"), assumed, strict=True))
    if args.memory_rate is not None:
        memory["memory_rate"] = args.memory_rate
    cluster = native.Cluster(
        ranks_of_hosts,
        interfaces,
        **memory,
        round_robin=args.placement == "round-robin",
        host_links=args.host_links,
    )
    model = native.CostModel()
    model.dimensions = [native.LinkCost(latency, rate) for rate, latency in args.links]
    request = native.PlanRequest()
    itemsize = native.dtype_size(args.dtype)
    if max(args.nbytes, args.segment) > _MAX_BYTES:
        _refuse(f"--bytes and --segment may be up to {_MAX_BYTES >> 40} TiB")
    request.dtype = args.dtype
    request.count = -(-args.nbytes // itemsize)
    request.mode = "" if _is_listed_only(args.mode) else args.mode
    request.segment = args.segment
    request.order = args.order
    request.collective = args.collective
    request.nccl = _nccl(args) or request.nccl
    collective = Collective(
        cluster=cluster,
        interfaces=interfaces,
        host_links=args.host_links,
        name=args.collective,
        count=request.count,
        dtype=args.dtype,
        order=request.order if native.adds(args.collective) else "",
    )
    return collective, request, model


def _is_listed_only(mode: str) -> bool:
    """Whether a mode is one of the table's algorithms that are no plan of the collective itself."""
    return mode in _WITHOUT_PLAN or mode.startswith(_ALLREDUCE_OF)


def _rows(
    args: argparse.Namespace,
    collective: Collective,
    request: native.PlanRequest,
    model: native.CostModel,
) -> list[native.AlgorithmRow]:
    """The table of algorithms; or what --mode names, or else what is chosen in it."""
    rows = native.algorithm_table(collective.cluster, request, model)
    if not _is_listed_only(args.mode):
        chosen = sorted((row for row in rows if row.is_chosen), key=lambda row: bool(row.needs))
        return chosen + ([row for row in rows if not row.is_chosen] if args.explain else [])
    hosts = collective.cluster.ranks
    if args.mode in _WITHIN_HOST and len(hosts) > 1:
        flat = f"{max(map(len, hosts))}x{len(hosts)}"
        _refuse(
            f"--mode {args.mode} is for ranks of one host; across hosts take a mode such as {flat}, or rounds"
        )
    mode = args.mode
    if mode.startswith(_ALLREDUCE_OF):  # a dimension without a letter takes the pairwise exchange
        mode = re.sub(r"(\d)(?=x|$)", r"\1p", mode)
    # Direct is for symmetric arrays: others are staged.
    named = [row for row in rows if row.name == mode or (mode == "direct" and row.name == "staged")]
    if len(hosts) == 1 and collective.name != "allreduce":
        _refuse(
            f"--mode {args.mode} is for allreduces: MULTIRING_MODE forces no {collective.name} of one host"
        )
    if not named:
        quickest = [row.name for row in rows if row.name.startswith(_ALLREDUCE_OF)]
        is_of_those = bool(quickest) and mode.startswith(_ALLREDUCE_OF)
        listed = f"; of allreduces the table has the quickest, {quickest[0]}" if is_of_those else ""
        _refuse(f"{collective.name} has no {args.mode} here: leave --mode out, or see --explain{listed}")
    return named


def _prediction(
    collective: Collective, row: native.AlgorithmRow, plan: native.Plan, model: native.CostModel
) -> Prediction:
    """The plan that is chosen, and what it costs."""
    return Prediction(
        **vars(collective),
        row=row,
        plan=plan,
        limit=native.plan_limit(plan, model),
        step_seconds=native.predict_steps(plan, model),
    )


def _ranks_of_hosts(args: argparse.Namespace) -> list[int]:
    if not isinstance(args.hosts, int):
        if args.ranks_per_host is not None:
            _refuse("--hosts tells the ranks of each host already: leave --ranks-per-host out")
        ranks, total = list(args.hosts), sum(args.hosts)
    else:
        each = args.ranks_per_host or 1
        total = each * args.hosts
        ranks = [each] * args.hosts if total <= _MAX_RANKS else []
    if total > _MAX_RANKS:
        _refuse(f"plans are worked out for at most {_MAX_RANKS} ranks here, not {total}")
    return ranks


def _interface_rates(args: argparse.Namespace) -> list[float]:
    if len(args.rate) > 1 and args.interfaces not in (None, len(args.rate)):
        _refuse(
            f"--rate tells the speeds of {len(args.rate)} interfaces, and --interfaces is {args.interfaces}"
        )
    return list(args.rate) if len(args.rate) > 1 else list(args.rate) * (args.interfaces or 1)


def _refuse(message: str) -> None:
    raise UsageError(message)


def _layout(text: str) -> int | tuple[int, ...]:
    """A number of hosts, or the ranks of each."""
    hosts, by, each = text.partition("x")
    if by:
        count, ranks = number_of("hosts")(hosts), number_of("ranks")(each)
        if count * ranks > _MAX_RANKS:
            raise argparse.ArgumentTypeError(f"plans are worked out for at most {_MAX_RANKS} ranks here")
        return (ranks,) * count
    parts = tuple(number_of("ranks")(part) for part in text.split("+"))
    return parts if len(parts) > 1 else parts[0]


def _rates(text: str) -> tuple[float, ...]:
    return tuple(units.rate(part) for part in text.split(","))


def _links(text: str) -> tuple[tuple[float, float], ...]:
    links = []
    for part in text.split(","):
        rate, colon, latency = part.partition(":")
        links.append((units.rate(rate), units.seconds(latency) if colon else 20e-6))
    return tuple(links)
