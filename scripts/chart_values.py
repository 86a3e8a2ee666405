"""Model of the chart's values: values.yaml, its JSON schema and the table in the docs come from it.

What a node, a gateway and a policy may be told is not written again here: those fields are the
models of the code itself. scripts/chart_files.py writes what comes from it.

Only `global` takes what it does not know, as Helm hands it to charts that have this one inside.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.alias_generators import to_camel

from elastic_scheduler import policy_names
from elastic_scheduler.capacity import CapacityPolicy, PolicyMode
from rose.addresses import DefaultPort
from rose.gateway.settings import COUNTS, TIMES
from rose.node.config import NodeConfig, ReplicaConfig


class Strict(BaseModel):
    """Values that refuse what they do not know; null in a file means: as by default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


def _pattern(pattern: str) -> Any:  # noqa: ANN401 - metadata of a field
    return Field(pattern=f"^{pattern}$")


Port = Annotated[int, Field(ge=1, le=65_535)]
Quantity = Annotated[str, _pattern(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?")]
Size = Annotated[str, _pattern(r"[0-9]+(Mi|Gi|Ti)")]
Name = Annotated[str, _pattern(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")]
SecretName = Annotated[str, _pattern(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?")]
DnsLabel = Annotated[str, _pattern(r"([a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?)?")]
Address = Annotated[str, _pattern(r"[^\s,/]+:[0-9]{1,5}")]
Digest = Annotated[str, _pattern(r"(sha256:[0-9a-f]{64})?")]
Percent = Annotated[str, _pattern(r"[0-9]{1,2}%|100%")] | Annotated[int, Field(ge=1)]
Hours = Annotated[str, _pattern(r"[0-9]+h")]
Labels = dict[str, str]
Kube = dict[str, Any]


def _said(what: str, default: Any = ..., **more: Any) -> Any:  # noqa: ANN401 - as pydantic's Field
    return Field(default=default, description=what, **more)


def _chosen(model: type[BaseModel], name: str, left_out: Sequence[str], what: str) -> Any:  # noqa: ANN401
    """Return a model of the other fields: what is left out is the chart's to set."""
    fields: dict[str, Any] = {
        key: (field.annotation, field)
        for key, field in model.model_fields.items()
        if key not in left_out
    }
    config = ConfigDict(**{**model.model_config, "title": name})
    return create_model(name, __config__=config, __doc__=what, **fields)


PolicyValues = _chosen(
    CapacityPolicy,
    "PolicyValues",
    ("name", "mode"),
    "Policy for all nodes, as docs/capacity-policy.md has it; its mode is the chart's.",
)
# The chart sets these by itself: places of files and names.
SET_BY_THE_CHART: Final = (
    "node",
    "scheduler",
    "run_dir",
    "log_dir",
    "certificates",
    "metrics_port",
    "metrics_host",
    "metrics_insecure",
    "proxy",
)


class NodeValues(
    _chosen(NodeConfig, "NodeFile", (*SET_BY_THE_CHART, "replicas"), "")  # type: ignore[misc]
):
    """The node's file, as docs/node.md has it, but for what the chart sets."""

    replicas: tuple[ReplicaConfig, ...] = ()


GatewayOptions = create_model(
    "GatewayOptions",
    __config__=Strict.model_config,
    __doc__="Options of `rose gateway` by name; what is left out is as by default.",
    **{name.replace("-", "_"): (Annotated[float, Field(ge=0)] | None, None) for name in TIMES},
    **{name.replace("-", "_"): (Annotated[int, Field(ge=1)] | None, None) for name in COUNTS},
)  # type: ignore[call-overload]


class Resources(Strict):
    """Requests and limits of a container."""

    requests: dict[str, Quantity | float] = _said("what the node keeps free for it", {})
    limits: dict[str, Quantity | float] = _said("what it may take at most", {})


def _resources(cpu: str, memory: str, most: str) -> Resources:
    return Resources(requests={"cpu": cpu, "memory": memory}, limits={"memory": most})


class Image(Strict):
    """Image of a container, in mode Active by what it is and not by what it is called."""

    repository: str = _said("where it is, without tag", min_length=1)
    digest: Digest = _said(
        "sha256:… of the image, as mode Active wants it; `make images` prints it", ""
    )
    tag: str = _said("used without a digest; the chart's version when empty", "")
    unpinned: bool = _said("mode Active: take whatever the tag names today", False)
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = _said(
        "when it is pulled", "IfNotPresent"
    )


class Images(Strict):
    """Images of all containers."""

    control: Image = _said(
        "control plane, and nodes while nothing is lent", Image(repository="rose")
    )
    node: Image = _said(
        "nodes in mode Active: with the engine of their guests", Image(repository="rose-node")
    )
    etcd: Image = _said(
        "etcd 3.5.11 or newer, where `store.own` is",
        Image(repository="registry.k8s.io/etcd", tag="3.5.21-0"),
    )


class NamedSecret(Strict):
    """Secret as pods name it."""

    name: Name = _said("its name")


class EnvVar(Strict):
    """Environment variable of a container."""

    name: Annotated[str, _pattern("[A-Za-z_][A-Za-z0-9_]*")] = _said("its name")
    value: str = _said("its value", "")
    value_from: Kube = _said("or the place that has it", {})


class ServiceAccount(Strict):
    """Service account of a kind of pod."""

    annotations: Labels = _said("as workload identities of clouds want them", {})


class Workload(Strict):
    """Options that all pods take, by one template: rose.common in _helpers.tpl."""

    node_selector: Labels = _said("labels of the machines that it runs on", {})
    tolerations: tuple[Kube, ...] = _said("of taints", ())
    affinity: Kube = _said("to machines and to other pods", {})
    pod_annotations: Labels = _said("further ones of its pods", {})
    pod_labels: Labels = _said("further ones of its pods; the chart's own stay", {})
    extra_env: tuple[EnvVar, ...] = _said("further environment", ())
    extra_args: tuple[str, ...] = _said("further options of its command", ())
    extra_volumes: tuple[Kube, ...] = _said("further volumes", ())
    extra_volume_mounts: tuple[Kube, ...] = _said("places of further volumes", ())
    service_account: ServiceAccount = _said("annotations of its service account", ServiceAccount())


class ControlWorkload(Workload):
    """Options of all pods but nodes, whose place and priority the harvest decides."""

    priority_class_name: SecretName = _said("priority class of its pods", "")
    topology_spread_constraints: tuple[Kube, ...] | None = _said(
        "null: where there are several, over machines and zones where possible; []: none", None
    )


class Commands(ControlWorkload):
    """Jobs with the operator's commands: the policy, stop-all, resume, `helm test`, backups."""


class Ingress(Strict):
    """Ingress of a port."""

    enabled: bool = _said("write it", False)
    class_name: str = _said("its class; the cluster's default when empty", "")
    annotations: Labels = _said(
        "as the controller wants them; with certificates it has to speak HTTPS to the pods"
        " (`nginx.ingress.kubernetes.io/backend-protocol: HTTPS`)",
        {},
    )
    hosts: tuple[str, ...] = _said("names under which it is reached", ())
    tls_secret: SecretName = _said("secret with the certificate of these names", "")


class Secrets(Strict):
    """Secrets with ca.crt, tls.crt and tls.key: certificates of each role."""

    scheduler: SecretName = _said("of role scheduler", "")
    gateway: SecretName = _said("of role gateway", "")
    relay: SecretName = _said("of role relay", "")
    operator: SecretName = _said("of role operator: applies the policy, runs `helm test`", "")
    viewer: SecretName = _said("of role viewer: reads everything, changes nothing", "")
    nodes: SecretName = _said(
        "of all nodes: ca.crt, and NODE.crt and NODE.key of each; a node's container sees its"
        " own alone",
        "",
    )
    node_ca: SecretName = _said(
        "or of a CA that signs what each node asks for: its certificate as tls.crt and key as"
        " tls.key, and as ca.crt who vouches for it",
        "",
    )


class Issuer(Strict):
    """Issuer of cert-manager."""

    name: str = _said("its name", "")
    kind: Literal["Issuer", "ClusterIssuer"] = _said("its kind", "ClusterIssuer")
    group: str = _said("its API group", "cert-manager.io")


class CertManager(Strict):
    """Certificates by cert-manager."""

    enabled: bool = _said("let cert-manager write the secrets", False)
    issuer: Issuer = _said("a CA of its own for ROSE", Issuer())
    duration: Hours = _said("life of a certificate", "720h")
    renew_before: Hours = _said("how long before its end it is renewed", "240h")
    nodes: tuple[Name, ...] = _said(
        "names of the Kubernetes nodes that get one; none: each node asks for its own", ()
    )


class Tls(Strict):
    """Identities of the processes (docs/security.md)."""

    insecure: bool = _said(
        "ask nobody who he is: whoever reaches the scheduler can lease every replica", False
    )
    secrets: Secrets = _said("secrets of your own", Secrets())
    cert_manager: CertManager = _said("or those of cert-manager", CertManager())
    signer: ControlWorkload = _said(
        "pod that signs certificates of nodes, where they ask for them", ControlWorkload()
    )


class OwnEtcd(ControlWorkload):
    """An etcd of the chart's own."""

    enabled: bool = _said("run it; false where `store.endpoints` names another", True)
    members: Literal[1, 3, 5] = _said(
        "3 survive the loss of one; 1 is for trials. It stays as installed", 3
    )
    size: Size = _said("disk of each member", "8Gi")
    storage_class: str = _said("of its disks; the cluster's default when empty", "")
    resources: Resources = _said("of each member", _resources("100m", "256Mi", "1Gi"))


class StoreValues(Strict):
    """Store of what outlives schedulers: jobs, policies, lease epochs, the stop."""

    own: OwnEtcd = _said("etcd of the chart's own", OwnEtcd())
    endpoints: tuple[Address, ...] = _said("of an etcd that is there: HOST:PORT of each", ())
    prefix: Annotated[str, _pattern("[A-Za-z0-9._-]+")] = _said("keys lie below it", "rose")
    user: str = _said("of etcd", "")
    password_secret: SecretName = _said("secret with its password under `password`", "")
    tls_secret: SecretName = _said("secret with ca.crt, tls.crt, tls.key for etcd", "")


class Service(Strict):
    """Kubernetes Service of a port."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = _said("its type", "ClusterIP")
    annotations: Labels = _said("as load balancers want them", {})


class AlertRules(Strict):
    """Alertmanager's webhook, /v1/alerts (docs/operators/alerts.md)."""

    token_secret: SecretName = _said(
        "secret with the bearer token under `token`, 32 random bytes or more; none: not served", ""
    )
    port: Port = _said(
        "where Alertmanager posts; `networkPolicy.peers.monitoring` may", DefaultPort.ALERTS
    )
    rules: tuple[Kube, ...] = _said("which alerts hold which nodes, as that page has them", ())


class WebhookValues(Strict):
    """Events for people, posted as CloudEvents (docs/operators/events.md)."""

    url: Annotated[str, _pattern(r"(https?://[^\s]+)?")] = _said("where they are posted", "")
    secret: SecretName = _said("secret with the key that signs them, whsec_…, under `secret`", "")
    severity: Literal["info", "ticket", "page"] = _said("least severity that is posted", "info")


class Scheduler(ControlWorkload):
    """Schedulers, of which one leads."""

    replicas: int = _said("how many; one leads, the others stand by", 2, ge=1, le=7)
    port: Port = _said("of gRPC", DefaultPort.SCHEDULER)
    metrics_port: Port = _said("of /metrics", DefaultPort.SCHEDULER_METRICS)
    dashboard_port: Port | None = _said(
        "of the dashboard, on the pods' loopback, where `kubectl port-forward` reaches it;"
        " null: none",
        DefaultPort.DASHBOARD,
    )
    policy: str = _said(
        "which offers are leased", "rose", json_schema_extra={"enum": sorted(policy_names())}
    )
    cooldown_s: float | None = _said("pause between a revocation and the next lease", None, ge=0)
    hold_s: float | None = _said("least time that a guest stays with a job", None, ge=1)
    jobs: tuple[str, ...] = _said(
        "NAME or NAME=MODEL: lease dedicated replicas to it before its trainer comes", ()
    )
    advertise: Annotated[str, _pattern(r"([^\s,/]+:[0-9]{1,5})?")] = _said(
        "HOST:PORT under which other clusters reach the one replica; several replicas name their"
        " pods' addresses",
        "",
    )
    alerts: AlertRules = _said("holds by alerts", AlertRules())
    webhook: WebhookValues = _said("events for people", WebhookValues())
    dashboard_token_secret: SecretName = _said(
        "secret with the dashboard's token under `token`: the dashboard asks for it, and leaves"
        " loopback",
        "",
    )
    dashboard_ingress: Ingress = _said("of the dashboard, where it has a token", Ingress())
    service: Service = _said("of gRPC", Service())
    resources: Resources = _said("of each", _resources("200m", "256Mi", "1Gi"))


class Controller(Strict):
    """Policies as objects of Kubernetes (docs/operators/policy-objects.md)."""

    enabled: bool = _said(
        "schedulers act on RoseCapacityPolicy objects, by a token of the API server", True
    )
    kubeconfig_secret: SecretName = _said(
        "of another cluster, whose objects count: secret with its kubeconfig under `config`", ""
    )
    node_labels: tuple[Annotated[str, _pattern(r"[^\s,=]+")], ...] = _said(
        "labels of Kubernetes nodes that policies go by, as `pool` or `example.com/*`; nodes are"
        " not believed about them",
        (),
    )


class Quota(Strict):
    """Job whose guests Kueue or KAI admits, by placeholder pods (docs/operators/quotas.md)."""

    job: Annotated[str, _pattern("[A-Za-z0-9]([-\\w.]{0,38}[A-Za-z0-9])?")] = _said("its name")
    namespace: SecretName = _said("of its pods; the release's when empty", "")
    queue: Name = _said("LocalQueue of that namespace, or Queue of KAI")
    scheduler: Literal["kueue", "kai"] = _said("who admits the pods", "kueue")
    most: int = _said("pods, and so guests at most", ge=1, le=4_096)
    priority_class: SecretName = _said("Kueue's WorkloadPriorityClass; for KAI, else `train`", "")


class BatchValues(Strict):
    """Files and batches of the gateways (OpenAI's Batch API)."""

    claim: SecretName = _said(
        "volume claim that has them; of several gateways ReadWriteMany. Not served when empty", ""
    )


class GatewayValues(ControlWorkload):
    """Gateways: HTTP front of all replicas."""

    enabled: bool = _said("run them", True)
    replicas: int = _said("how many", 2, ge=1, le=64)
    port: Port = _said("of HTTP", DefaultPort.GATEWAY)
    model_name: str = _said("name of the model in answers", "rose-policy")
    max_model_len: int | None = _said("tokens; else what replicas say", None, ge=2)
    token_keys_secret: SecretName = _said("secret with the public keys under `keys.json`", "")
    token_audience: str = _said("audience of tokens", "rose")
    hosts: tuple[str, ...] = _said("names under which clients reach it, for its certificate", ())
    batches: BatchValues = _said("batch jobs", BatchValues())
    options: GatewayOptions = _said("further options", GatewayOptions())  # type: ignore[valid-type]
    service: Service = _said("of HTTP", Service())
    ingress: Ingress = _said(
        "for clients outside; it ends TLS, so callers show tokens (`tokenKeysSecret`)", Ingress()
    )
    resources: Resources = _said("of each", _resources("500m", "512Mi", "2Gi"))


class Persistence(Strict):
    """Volumes of the records: audit log, usage and events."""

    enabled: bool = _said(
        "keep records on volumes: schedulers and gateways are StatefulSets then, with a disk each."
        " Off by default, since a disk ties its pod to a zone, and a StatefulSet waits for a"
        " machine that is lost; with `logFormat: json` a collector of logs has the records as well",
        False,
    )
    size: Size = _said("of each disk", "2Gi")
    storage_class: str = _said("of the disks; the cluster's default when empty", "")
    existing_claim: SecretName = _said(
        "or one claim that all of them write to (ReadWriteMany), each in a folder of its own", ""
    )
    node_folder: Annotated[str, _pattern("(/[^ ]+)?")] = _said(
        "of nodes, on their machine: `records` in the shared folder when empty, which outlives pods"
        " and no restart of a machine; another has to be there, of user 10001",
        "",
    )


class RecordsValues(Strict):
    """Audit log, usage and events of all processes."""

    persistence: Persistence = _said("that they outlive their pods", Persistence())


class BackupValues(Strict):
    """Backups of the store (docs/operators/backup.md)."""

    enabled: bool = _said("make them: a CronJob of `rose store backup`", False)
    schedule: Annotated[str, _pattern(r"(\S+ ){4}\S+|@\w+")] = _said(
        "minute, hour, day, month, weekday; of the cluster's clock", "17 3 * * *"
    )
    keep: int = _said("how many stay", 14, ge=1, le=1000)
    size: Size = _said("of the disk with them, which `helm uninstall` keeps", "1Gi")
    storage_class: str = _said("of the disk; the cluster's default when empty", "")
    existing_claim: SecretName = _said("or a claim that is there", "")


class RelayJob(Strict):
    """A job whose weights are passed on."""

    name: str = _said("of the job", min_length=1)
    origin: Annotated[str, _pattern(r"https?://[^\s]+")] = _said("URL of its publisher")
    verify_key: Annotated[str, _pattern("([0-9a-f]{64})?")] = _said("key of its trainer", "")


class RelayValues(ControlWorkload):
    """A relay: fetches weights once for this cluster and passes them on."""

    enabled: bool = _said("run it", False)
    port: Port = _said("of HTTP", DefaultPort.RELAY)
    metrics_port: Port = _said("of /metrics", DefaultPort.RELAY_METRICS)
    jobs: tuple[RelayJob, ...] = _said("whose weights", ())
    unsigned: bool = _said("keep what nobody signed", False)
    bytes_per_s: int | None = _said("of the link to the publisher", None, ge=1)
    token_secret: SecretName = _said("secret with the cluster's token under `token`", "")
    size: Size = _said("disk for weights", "200Gi")
    storage_class: str = _said("of its disk; the cluster's default when empty", "")
    resources: Resources = _said("of it", _resources("500m", "512Mi", "2Gi"))


class SharedFolder(Strict):
    """Folder of the machine in which hosts have their control pages, and the node finds them."""

    path: Annotated[str, _pattern("/[^ ]+")] = _said("on the machine and in the pod", "/run/rose")
    group: int = _said("group that host pods and nodes share", 10_777, ge=1)
    prepare: bool = _said(
        "let a container of root make it, with this group and mode 2770; else it has to be there",
        False,
    )


class ModelsValues(Strict):
    """Volume of the guests' models, mounted at /models, read only."""

    host_path: str = _said("folder of the machine", "")
    claim: SecretName = _said("or a PersistentVolumeClaim", "")


class PriorityClass(Strict):
    """Priority of node pods: first to go, and they push nobody out."""

    create: bool = _said("make it; else it has to be there", True)
    name: SecretName = _said("its name; RELEASE-guest when empty", "")
    value: int = _said("below everything that serves", -1_000, le=-1)


class Node(Workload):
    """Nodes: a daemon on each machine with the label."""

    config: NodeValues = _said(
        "the node's file, but for what the chart sets; `replicas` run in mode Active alone",
        NodeValues(discover={"folder": "/run/rose"}),
    )
    metrics_port: Port = _said(
        "of /metrics; on loopback unless `monitoring.podMonitor`", DefaultPort.NODE_METRICS
    )
    proxy_port: Port = _said("gateways reach guests by it, in mode Active", DefaultPort.PROXY)
    node_selector: Labels = _said(
        "label off: ROSE leaves the machine", {"rose.dev/harvest": "enabled"}
    )
    max_unavailable: Percent = _said("nodes that an upgrade restarts at once", "10%")
    shared_folder: SharedFolder = _said("with the host", SharedFolder())
    models: ModelsValues = _said("of guests", ModelsValues())
    run_folder: str = _said(
        "folder of the machine for weights, of user 10001; else they go with the pod", ""
    )
    shm: Size = _said("size of /dev/shm in mode Active", "16Gi")
    device_class: str = _said("of `access: dra-admin`", "gpu.nvidia.com")
    runtime_class: str = _said("of `access: runtime-class`", "nvidia")
    priority_class: PriorityClass = _said("of its pods", PriorityClass())
    advisory_resources: Resources = _said(
        "while nothing is lent", _resources("100m", "256Mi", "1Gi")
    )
    resources: Resources = _said(
        "in mode Active: with guests and their pinned copies", _resources("1", "16Gi", "64Gi")
    )


class Peers(Strict):
    """Further peers that may connect, as NetworkPolicyPeer; none when empty."""

    trainers: tuple[Kube, ...] = _said("to schedulers and gateways; publishers of weights", ())
    clients: tuple[Kube, ...] = _said("to gateways", ())
    nodes: tuple[Kube, ...] = _said("nodes of other clusters, to schedulers and the relay", ())
    gateways: tuple[Kube, ...] = _said("gateways of other clusters, to nodes' proxies", ())
    monitoring: tuple[Kube, ...] = _said(
        "to /metrics",
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},),
    )
    dashboard: tuple[Kube, ...] = _said(
        "to the dashboard, where it has a token: the proxy or Ingress before it", ()
    )
    dns: tuple[Kube, ...] = _said(
        "name servers",
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},),
    )
    webhook: tuple[Kube, ...] = _said(
        "receiver of `scheduler.webhook.url`, on that URL's port; any address when empty", ()
    )
    etcd: tuple[Kube, ...] = _said("an etcd that is there; any address when empty", ())
    api_server: tuple[Kube, ...] = _said(
        "API server of `controller`, on 443 and 6443; any address when empty", ()
    )


class NetworkPolicies(Strict):
    """Default deny for all pods of the release, and what they need."""

    enabled: bool = _said("write them", True)
    peers: Peers = _said("of other pods than the release's", Peers())


class Webhook(ControlWorkload):
    """Webhook that makes hosts of pods with a label (docs/operators/stacks.md)."""

    enabled: bool = _said(
        "pods labelled `rose.dev/host: enabled` get the plugin and the shared folder as they are"
        " created",
        False,
    )
    replicas: int = _said("how many; while none answers pods start as they are", 2, ge=1, le=7)
    port: Port = _said("of HTTPS, for the API server", DefaultPort.WEBHOOK)
    namespace_selector: Kube = _said(
        "namespaces whose pods it may change, by default those that admit hostPath volumes; all"
        " when empty",
        {
            "matchExpressions": [
                {
                    "key": "pod-security.kubernetes.io/enforce",
                    "operator": "NotIn",
                    "values": ["baseline", "restricted"],
                }
            ]
        },
    )
    resources: Resources = _said("of each", _resources("10m", "96Mi", "256Mi"))


class Severities(Strict):
    """Words for the severities of alerts."""

    page: str = _said("somebody is woken", "page")
    ticket: str = _said("working hours will do", "ticket")
    info: str = _said("a reminder", "info")


class Monitoring(Strict):
    """Switches of the objects for Prometheus and Grafana."""

    pod_monitor: bool = _said("PodMonitor of schedulers, gateways, the relay and etcd", False)
    prometheus_rule: bool = _said("PrometheusRule of files/rules", False)
    dashboards: bool = _said("ConfigMaps of files/dashboards, for Grafana's sidecar", False)
    interval: Annotated[str, _pattern("[0-9]+s")] = _said("between scrapes", "15s")
    labels: Labels = _said("that your Prometheus selects by", {})
    prometheus_url: str = _said(
        "address of your Prometheus, for the schedulers' dashboard: history beyond ten minutes and"
        " advice; one of `networkPolicy.peers.monitoring`",
        "",
    )
    severities: Severities = _said("label `severity` of alerts, in your words", Severities())
    rule_labels: Labels = _said("further labels of each alert", {})
    runbook_url: str = _said(
        "where the runbooks are served, with NAME for the alert; without it `/NAME.md` follows."
        " Paths of this repository when empty",
        "",
    )


class Crds(Strict):
    """CustomResourceDefinitions."""

    install: bool = _said("install and upgrade them; `helm uninstall` keeps them", True)


class Subject(Strict):
    """Subject with the rights of an operator."""

    kind: Literal["User", "Group", "ServiceAccount"] = _said("what it is")
    name: str = _said("its name", min_length=1)
    namespace: str = _said("of a ServiceAccount", "")


class Rbac(Strict):
    """Roles of people, and of the controller."""

    create: bool = _said("viewer and editor of capacity policies; the controller's", True)
    aggregate: bool = _said("add them to the cluster's roles view, edit and admin", True)
    operators: tuple[Subject, ...] = _said("who may read the operator's certificate", ())
    viewers: tuple[Subject, ...] = _said(
        "who may read the viewer's certificate, which is there where they are", ()
    )


class Toolbox(Strict):
    """Pod with `rose`, the operator's certificate and the scheduler's address."""

    enabled: bool = _said("run it: whoever may `kubectl exec` into it is an operator", False)
    resources: Resources = _said("of it", _resources("10m", "64Mi", "1Gi"))


class HelmTest(Strict):
    """`helm test`: stops everything, sees that nothing is held, and goes on."""

    enabled: bool = _said("have it", True)
    within_s: int = _said("by when guests must be gone", 30, ge=1, le=600)


class Global(BaseModel):
    """Values that Helm shares between charts; others than these are somebody else's."""

    model_config = ConfigDict(extra="allow", frozen=True, alias_generator=to_camel)

    image_registry: str = _said("registry of all images, in the place of their own", "")
    image_pull_secrets: tuple[Name | NamedSecret, ...] = _said("of a private registry", ())


class Values(Strict):
    """All values of the chart."""

    global_: Global = Field(
        default=Global(), alias="global", description="shared with other charts"
    )
    name_override: DnsLabel = _said("name of the chart in names and labels, for `rose`", "")
    fullname_override: Annotated[str, _pattern("([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?")] = _said(
        "begin of all names; else that of the release", ""
    )
    role: Literal["all", "control", "nodes"] = _said(
        "what of ROSE this cluster has: nodes join the `schedulers` of another cluster", "all"
    )
    mode: PolicyMode = _said(
        "Off; Advisory: compute and say what would be done, lend nothing, ask for no GPU; Active",
        PolicyMode.ADVISORY,
    )
    trial: bool = _said(
        "to look at Advisory, not for production: one scheduler on SQLite, one gateway, the shared"
        " folder made, a toolbox; it goes before their own values",
        False,
    )
    access: Literal["auto", "dra-admin", "runtime-class", "privileged"] = _said(
        "how a node reaches its GPUs in mode Active; auto: dra-admin where the cluster has"
        " resource.k8s.io/v1, else runtime-class",
        "auto",
    )
    cluster: Annotated[str, _pattern("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")] = _said(
        "name in all certificates", "rose"
    )
    schedulers: tuple[Address, ...] = _said("of another cluster, for role nodes: HOST:PORT", ())
    log_level: Literal["debug", "info", "warning", "error"] = _said(
        "least level that processes log", "info"
    )
    log_format: Literal["text", "json"] = _said(
        "json: an object a line, records included, on standard output; text: lines for people",
        "json",
    )
    policy: PolicyValues = _said("for all nodes: caps, reserves, windows", PolicyValues())  # type: ignore[valid-type]
    images: Images = _said("in mode Active by digest", Images())
    image_pull_secrets: tuple[Name | NamedSecret, ...] = _said("of a private registry", ())
    tls: Tls = _said("identities; self-made where none are named and mode is not Active", Tls())
    store: StoreValues = _said("etcd", StoreValues())
    scheduler: Scheduler = _said("schedulers", Scheduler())
    controller: Controller = _said("policies as objects", Controller())
    quotas: tuple[Quota, ...] = _said("jobs whose guests Kueue or KAI admits", ())
    gateway: GatewayValues = _said("gateways", GatewayValues())
    relay: RelayValues = _said("relay", RelayValues())
    node: Node = _said("nodes", Node())
    records: RecordsValues = _said("audit log, usage and events", RecordsValues())
    backup: BackupValues = _said("backups of the store", BackupValues())
    webhook: Webhook = _said("hosts by a label of their pods", Webhook())
    commands: Commands = _said("jobs with the operator's commands", Commands())
    network_policy: NetworkPolicies = _said("who reaches whom", NetworkPolicies())
    pod_disruption_budgets: bool = _said("one pod of a kind at a time", True)
    monitoring: Monitoring = _said("Prometheus and Grafana", Monitoring())
    crds: Crds = _said("definitions", Crds())
    rbac: Rbac = _said("roles", Rbac())
    toolbox: Toolbox = _said("pod for an operator's commands", Toolbox())
    test: HelmTest = _said("`helm test`", HelmTest())
