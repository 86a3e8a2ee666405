{{- /* What the schema cannot say: values that contradict each other, a sentence each. */ -}}
{{- define "rose.checks" -}}
{{- $v := .Values }}
{{- $control := include "rose.hasControl" . }}
{{- $nodes := include "rose.hasNodes" . }}
{{- if and $v.tls.insecure $v.tls.certManager.enabled }}
{{- fail "tls.insecure and tls.certManager.enabled contradict each other: leave one of them out" }}
{{- end }}
{{- if and $v.tls.certManager.enabled (not $v.tls.certManager.issuer.name) }}
{{- fail "tls.certManager.issuer.name is missing: name an Issuer or ClusterIssuer whose CA is ROSE's own" }}
{{- end }}
{{- if not $v.tls.insecure }}
{{- $roles := list }}
{{- if $control }}{{ $roles = list "scheduler" "operator" }}{{ end }}
{{- if include "rose.hasGateway" . }}{{ $roles = append $roles "gateway" }}{{ end }}
{{- if $v.relay.enabled }}{{ $roles = append $roles "relay" }}{{ end }}
{{- if and $nodes (not $v.tls.certManager.enabled) }}{{ $roles = append $roles "nodes" }}{{ end }}
{{- range $role := $roles }}
{{- if not (include "rose.secret" (list $ $role)) }}
{{- fail (printf "tls.secrets.%s is missing, and without certificates the ports would ask nobody who he is: name the secret, or set tls.certManager.enabled, or fence the network and set tls.insecure=true" $role) }}
{{- end }}
{{- end }}
{{- if and $nodes $v.tls.certManager.enabled (not $v.tls.secrets.nodes) (not $v.tls.certManager.nodes) }}
{{- fail "tls.certManager.nodes is empty: name the Kubernetes nodes with the label, each gets a certificate of its own; or give tls.secrets.nodes" }}
{{- end }}
{{- end }}
{{- if and (not $control) (not $v.schedulers) }}
{{- fail "role nodes joins the scheduler of another cluster: give schedulers, as {HOST:PORT}" }}
{{- end }}
{{- if and $control $v.schedulers }}
{{- fail "schedulers are those of another cluster, and this release has its own: leave them out, or set role=nodes" }}
{{- end }}
{{- if $control }}
{{- if and $v.store.own.enabled $v.store.endpoints }}
{{- fail "store.endpoints names an etcd, and store.own.enabled runs another: set store.own.enabled=false" }}
{{- end }}
{{- if not (or $v.store.own.enabled $v.store.endpoints) }}
{{- fail "there is no store: give store.endpoints, or set store.own.enabled=true" }}
{{- end }}
{{- if and $v.store.user (not $v.store.passwordSecret) }}
{{- fail "store.user has a password: name the secret in store.passwordSecret" }}
{{- end }}
{{- if and $v.scheduler.advertise (gt (int $v.scheduler.replicas) 1) }}
{{- fail "scheduler.advertise is the address of one scheduler: set scheduler.replicas=1, and for a standby install another release with an address of its own" }}
{{- end }}
{{- if and $v.scheduler.holdS (ne $v.scheduler.policy "rose") }}
{{- fail "scheduler.holdS is of the policy rose: leave it out, or set scheduler.policy=rose" }}
{{- end }}
{{- end }}
{{- if $v.relay.enabled }}
{{- if not $v.relay.jobs }}
{{- fail "relay.jobs is empty: name the jobs whose weights it passes on, or set relay.enabled=false" }}
{{- end }}
{{- $keys := 0 }}
{{- range $v.relay.jobs }}{{ if .verifyKey }}{{ $keys = add1 $keys }}{{ end }}{{ end }}
{{- if and (lt (int $keys) (len $v.relay.jobs)) (not (and $v.relay.unsigned (eq (int $keys) 0))) }}
{{- fail "relay.jobs: give each job its verifyKey, or none of them and relay.unsigned=true" }}
{{- end }}
{{- end }}
{{- if and $nodes (include "rose.active" .) }}
{{- if not $v.node.config.replicas }}
{{- fail "mode Active lends to guests, and node.config.replicas names none: add one, or set mode=Advisory" }}
{{- end }}
{{- if not (or $v.node.config.verify_key $v.node.config.unsigned) }}
{{- fail "node.config.verify_key is missing: whoever announces a version could put any weights into the guests; give the key, or node.config.unsigned=true" }}
{{- end }}
{{- end }}
{{- if and $v.node.models.hostPath $v.node.models.claim }}
{{- fail "node.models.hostPath and node.models.claim: leave one of them out" }}
{{- end }}
{{- end }}
