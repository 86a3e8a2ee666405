{{- /* What the schema cannot say: values that contradict each other, a sentence each. */ -}}
{{- define "rose.checks" -}}
{{- $v := .Values }}
{{- $control := include "rose.hasControl" . }}
{{- $nodes := include "rose.hasNodes" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (.Values.fullnameOverride | default .Release.Name)) }}
{{- fail (printf "the release's name %s begins the names of Services: give one of small letters, digits and dashes that begins with a letter, or fullnameOverride" .Release.Name) }}
{{- end }}
{{- if $v.trial }}
{{- if or $v.backup.enabled $v.records.persistence.enabled }}
{{- fail "trial=true keeps nothing, and its store is a file on the scheduler's disk: leave backup and records.persistence out" }}
{{- end }}
{{- if include "rose.active" . }}
{{- fail "trial=true is for looking, with a store and certificates that are not for production: leave trial out for mode Active, or set mode=Advisory" }}
{{- end }}
{{- if ne $v.role "all" }}
{{- fail "trial=true has all of ROSE in one cluster: leave role out" }}
{{- end }}
{{- if $v.store.endpoints }}
{{- fail "trial=true has a store of its own: leave store.endpoints out" }}
{{- end }}
{{- end }}
{{- if and $v.tls.insecure $v.tls.certManager.enabled }}
{{- fail "tls.insecure and tls.certManager.enabled contradict each other: leave one of them out" }}
{{- end }}
{{- if and $v.tls.certManager.enabled (not $v.tls.certManager.issuer.name) }}
{{- fail "tls.certManager.issuer.name is missing: name an Issuer or ClusterIssuer whose CA is ROSE's own" }}
{{- end }}
{{- if not (or $v.tls.insecure (include "rose.selfMade" .)) }}
{{- $roles := list }}
{{- if $control }}{{ $roles = list "scheduler" "operator" }}{{ end }}
{{- if include "rose.hasGateway" . }}{{ $roles = append $roles "gateway" }}{{ end }}
{{- if $v.relay.enabled }}{{ $roles = append $roles "relay" }}{{ end }}
{{- if and $control $v.rbac.create $v.rbac.viewers }}{{ $roles = append $roles "viewer" }}{{ end }}
{{- if and $nodes (not $v.tls.certManager.enabled) (not $v.tls.secrets.nodeCa) }}{{ $roles = append $roles "nodes" }}{{ end }}
{{- range $role := $roles }}
{{- if not (include "rose.secret" (list $ $role)) }}
{{- fail (printf "tls.secrets.%s is missing, and without certificates the ports would ask nobody who he is: name the secret, or set tls.certManager.enabled, or stay at mode=Advisory, where they are self-made, or fence the network and set tls.insecure=true" $role) }}
{{- end }}
{{- end }}
{{- if and $v.tls.secrets.nodeCa (or $v.tls.secrets.nodes $v.tls.certManager.nodes) }}
{{- fail "tls.secrets.nodeCa signs the certificates that nodes ask for: leave it out beside tls.secrets.nodes and tls.certManager.nodes" }}
{{- end }}
{{- end }}
{{- if and $v.rbac.viewers (include "rose.selfMade" .) }}
{{- fail "rbac.viewers: self-made certificates are in no secret that somebody could read: give tls.secrets.viewer or tls.certManager, or leave viewers out" }}
{{- end }}
{{- if and (not $control) (not $v.schedulers) }}
{{- fail "role nodes joins the scheduler of another cluster: give schedulers, as {HOST:PORT}" }}
{{- end }}
{{- if and $control $v.schedulers }}
{{- fail "schedulers are those of another cluster, and this release has its own: leave them out, or set role=nodes" }}
{{- end }}
{{- if $control }}
{{- include "rose.policyChecks" . }}
{{- if ne (empty $v.scheduler.alerts.tokenSecret) (empty $v.scheduler.alerts.rules) }}
{{- fail "scheduler.alerts needs both rules and tokenSecret: name the secret whose `token` Alertmanager shows, and write the rules; or leave both out" }}
{{- end }}
{{- if ne (empty $v.scheduler.webhook.url) (empty $v.scheduler.webhook.secret) }}
{{- fail "scheduler.webhook needs both url and secret: name the secret whose `secret` signs events, whsec_…; or leave both out" }}
{{- end }}
{{- if and $v.store.own.enabled $v.store.endpoints }}
{{- fail "store.endpoints names an etcd, and store.own.enabled runs another: set store.own.enabled=false" }}
{{- end }}
{{- if not (or $v.trial $v.store.own.enabled $v.store.endpoints) }}
{{- fail "there is no store: give store.endpoints, or set store.own.enabled=true" }}
{{- end }}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-etcd" (include "rose.name" .)) }}
{{- if $v.trial }}
{{- fail "trial=true would leave the etcd of this release behind: leave trial out, or install the trial under another name" }}
{{- end }}
{{- if and $v.store.own.enabled (ne (int .spec.replicas) (int $v.store.own.members)) }}
{{- fail (printf "store.own.members is %v, and the etcd of this release has %v: its members know each other, so set store.own.members=%[2]v; docs/operators/backup.md moves a store into another" $v.store.own.members .spec.replicas) }}
{{- end }}
{{- end }}
{{- if and $v.store.user (not $v.store.passwordSecret) }}
{{- fail "store.user has a password: name the secret in store.passwordSecret" }}
{{- end }}
{{- if and $v.scheduler.advertise (gt (int $v.scheduler.replicas) 1) }}
{{- fail "scheduler.advertise is the address of one scheduler: set scheduler.replicas=1, and for a standby install another release with an address of its own" }}
{{- end }}
{{- if and $v.controller.nodeLabels (not $v.controller.enabled) }}
{{- fail "controller.nodeLabels are read by the controller: set controller.enabled=true" }}
{{- end }}
{{- if and $v.scheduler.dashboardTokenSecret (not $v.scheduler.dashboardPort) }}
{{- fail "scheduler.dashboardTokenSecret: there is no dashboard; give scheduler.dashboardPort" }}
{{- end }}
{{- if and $v.scheduler.dashboardIngress.enabled (not $v.scheduler.dashboardTokenSecret) }}
{{- fail "scheduler.dashboardIngress: the dashboard is on loopback, and outside of it asks for a token; give scheduler.dashboardTokenSecret" }}
{{- end }}
{{- if and $v.scheduler.dashboardIngress.enabled (not (include "rose.hasLeaderService" .)) }}
{{- fail "scheduler.dashboardIngress leads to the scheduler that leads, and schedulers mark it by a token of the API server: set controller.enabled=true without a kubeconfigSecret, or scheduler.replicas=1" }}
{{- end }}
{{- range $face := list $v.scheduler.dashboardIngress $v.gateway.ingress }}
{{- if and $face.enabled (not $face.hosts) }}
{{- fail "an Ingress is enabled and has no name: give its hosts" }}
{{- end }}
{{- end }}
{{- if and $v.scheduler.holdS (ne $v.scheduler.policy "rose") }}
{{- fail "scheduler.holdS is of the policy rose: leave it out, or set scheduler.policy=rose" }}
{{- end }}
{{- end }}
{{- if and $v.quotas (not (include "rose.asksApiServer" .)) }}
{{- fail "quotas: schedulers count the pods by a token of this cluster's API server: set controller.enabled=true without a kubeconfigSecret, and not role=nodes; or leave quotas out" }}
{{- end }}
{{- $slugs := dict }}
{{- range $v.quotas }}
{{- $slug := .job | lower | replace "." "-" | replace "_" "-" }}
{{- if hasKey $slugs $slug }}
{{- fail (printf "quotas names job %s twice, or one whose pods would have the same name: give each job one entry" .job) }}
{{- end }}
{{- $_ := set $slugs $slug true }}
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

{{- /* Seconds of a duration as 500ms, 5s, 2m or 1h. */ -}}
{{- define "rose.seconds" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit) -}}
{{- end }}

{{- /* Helm takes a zone that it does not know for UTC, and knows none on a machine without a list. */ -}}
{{- define "rose.unknownZone" -}}
{{- $noon := toDate "2006-01-02" "2024-01-01" }}
{{- $utc := list "UTC" "Etc/UTC" "UCT" "Etc/UCT" "Zulu" "Etc/Zulu" "Universal" "Etc/Universal" }}
{{- if and (ne (dateInZone "MST" $noon "Europe/Berlin") "UTC") (eq (dateInZone "MST" $noon .) "UTC") (not (has . $utc)) }}yes{{ end -}}
{{- end }}

{{- /* What a scheduler would refuse once all else is installed: said before anything is. */ -}}
{{- define "rose.policyChecks" -}}
{{- $policy := .Values.policy }}
{{- if include "rose.active" . }}
{{- range $cap, $value := $policy.maxHarvest }}
{{- if regexMatch "^0+(%|[KMGT]i)?$" (toString $value) }}
{{- fail (printf "policy.maxHarvest.%s 0 lends nothing, though mode is Active: raise it, or set mode=Off" $cap) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $path, $bounds := dict "staleAfter" (list 2.0 5.0 "2s to 5s") "reclaimDeadline" (list 1.0 600.0 "1s to 10m") "cooldown" (list 0.0 86400.0 "24h at most") }}
{{- with get $policy $path }}
{{- $s := include "rose.seconds" . | float64 }}
{{- if or (lt $s (index $bounds 0)) (gt $s (index $bounds 1)) }}
{{- fail (printf "policy.%s is %s: write %s" $path . (index $bounds 2)) }}
{{- end }}
{{- end }}
{{- end }}
{{- with $policy.watermarks }}
{{- if gt (.low | default 0.8 | float64) (.high | default 0.9 | float64) }}
{{- fail "policy.watermarks.low is above high: swap them" }}
{{- end }}
{{- end }}
{{- with $policy.maxHostBusy }}
{{- if ge (.resume | default 0.7 | float64) (.share | default 0.85 | float64) }}
{{- fail "policy.maxHostBusy.resume is not below share: lower it, so that a host does not change each second" }}
{{- end }}
{{- with .over }}
{{- $s := include "rose.seconds" . | float64 }}
{{- if or (lt $s 1.0) (gt $s 600.0) }}
{{- fail (printf "policy.maxHostBusy.over is %s: write 1s to 10m" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $path := list "blackoutWindows" "allowedWindows" "during" }}
{{- range (get $policy $path | default list) }}
{{- if or (eq .from .to) (eq .from "24:00") }}
{{- fail (printf "policy.%s: a window from %s to %s is empty: write 00:00 to 24:00 for whole days" $path .from .to) }}
{{- end }}
{{- if and .days (ne (len .days) (len (uniq .days))) }}
{{- fail (printf "policy.%s: a day is there twice: name each once" $path) }}
{{- end }}
{{- if include "rose.unknownZone" .timeZone }}
{{- fail (printf "policy.%s: there is no time zone %s: write an IANA name, as Europe/Berlin or UTC" $path .timeZone) }}
{{- end }}
{{- end }}
{{- end }}
{{- $jobs := list }}
{{- range $policy.tenants }}
{{- if has .job $jobs }}
{{- fail (printf "policy.tenants has job %s twice: write it once" .job) }}
{{- end }}
{{- $jobs = append $jobs .job }}
{{- end }}
{{- end }}
