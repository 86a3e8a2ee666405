{{- define "rose.name" -}}
{{- $name := .Release.Name -}}
{{- with .Values.nameOverride }}{{ if not (contains . $name) }}{{ $name = printf "%s-%s" $name . }}{{ end }}{{ end -}}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* Labels that select: (list $ "scheduler") */ -}}
{{- define "rose.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Values.nameOverride | default "rose" }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "rose.labels" -}}
{{- $ := index . 0 -}}
{{ include "rose.selector" . }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rose
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name ($.Chart.Version | replace "+" "_") }}
{{- end }}

{{- define "rose.hasControl" -}}
{{- if ne .Values.role "nodes" }}true{{ end -}}
{{- end }}

{{- define "rose.hasNodes" -}}
{{- if ne .Values.role "control" }}true{{ end -}}
{{- end }}

{{- define "rose.hasGateway" -}}
{{- if and (include "rose.hasControl" .) .Values.gateway.enabled }}true{{ end -}}
{{- end }}

{{- define "rose.active" -}}
{{- if eq .Values.mode "Active" }}true{{ end -}}
{{- end }}

{{- /* A repository, in the registry of all charts where there is one. */ -}}
{{- define "rose.repository" -}}
{{- $registry := get ((index . 0).Values.global | default dict) "imageRegistry" -}}
{{- $repository := (index (index . 0).Values.images (index . 1)).repository -}}
{{- if $registry -}}
{{ trimSuffix "/" $registry }}/{{ regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "" }}
{{- else -}}
{{ $repository }}
{{- end -}}
{{- end }}

{{- /* By what it is: (list $ "control") */ -}}
{{- define "rose.image" -}}
{{- $image := index (index . 0).Values.images (index . 1) -}}
{{- if $image.digest -}}
{{ include "rose.repository" . }}@{{ $image.digest }}
{{- else if or $image.unpinned (not (include "rose.active" (index . 0))) -}}
{{ include "rose.repository" . }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- else -}}
{{- /* What is wrong besides may be why nobody gave it. */ -}}
{{- include "rose.checks" (index . 0) -}}
{{- fail (printf "images.%s.digest is missing: in mode Active give the sha256 of the image that is to run (`make images` prints it), or images.%[1]s.unpinned=true" (index . 1)) -}}
{{- end -}}
{{- end }}

{{- define "rose.pullSecrets" -}}
{{- with concat (get (.Values.global | default dict) "imagePullSecrets" | default list) .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* The secret with a role's certificate: (list $ "scheduler") */ -}}
{{- define "rose.secret" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- $given := index $.Values.tls.secrets $role -}}
{{- if $given -}}
{{ $given }}
{{- else if $.Values.tls.certManager.enabled -}}
{{ include "rose.name" $ }}-{{ $role }}-tls
{{- end -}}
{{- end }}

{{- /* A secret with a role's ca.crt, for who scrapes it: (list $ "scheduler") */ -}}
{{- define "rose.caSecret" -}}
{{- include "rose.secret" . | default (printf "%s-ca" (include "rose.name" (index . 0))) -}}
{{- end }}

{{- /* Options of any process: its certificate, or that it has none. */ -}}
{{- define "rose.tlsArgs" -}}
{{- if .Values.tls.insecure -}}
- --insecure
{{- else -}}
- --ca=/etc/rose/tls/ca.crt
- --certificate=/etc/rose/tls/tls.crt
- --key=/etc/rose/tls/tls.key
{{- end -}}
{{- end }}

{{- /* Options of an operator's command: without certificates it needs none. */ -}}
{{- define "rose.operatorArgs" -}}
--scheduler={{ include "rose.name" . }}-scheduler:{{ .Values.scheduler.port }}
{{- if not .Values.tls.insecure }} --ca=/etc/rose/tls/ca.crt --certificate=/etc/rose/tls/tls.crt --key=/etc/rose/tls/tls.key{{ end -}}
{{- end }}

{{- define "rose.schedulers" -}}
{{- if include "rose.hasControl" . -}}
{{ include "rose.name" . }}-scheduler.{{ .Release.Namespace }}.svc:{{ .Values.scheduler.port }}
{{- else -}}
{{ join "," .Values.schedulers }}
{{- end -}}
{{- end }}

{{- define "rose.store" -}}
{{- if .Values.trial -}}
/var/lib/rose/scheduler.sqlite
{{- else -}}
{{- $hosts := .Values.store.endpoints -}}
{{- if .Values.store.own.enabled -}}
{{- $hosts = list -}}
{{- range $i := until (int .Values.store.own.members) -}}
{{- $hosts = append $hosts (printf "%s-etcd-%d.%s-etcd.%s.svc:2379" (include "rose.name" $) $i (include "rose.name" $) $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
etcd://{{ join "," $hosts }}/{{ .Values.store.prefix }}
{{- end }}
{{- end }}

{{- /* Options of a process that opens the store, and the files that they name. */ -}}
{{- define "rose.storeArgs" -}}
- --store={{ include "rose.store" . }}
{{- with .Values.store.user }}
- --store-user={{ . }}
- --store-password-file=/etc/rose/store-password/password
{{- end }}
{{- if .Values.store.tlsSecret }}
- --store-ca=/etc/rose/store/ca.crt
- --store-cert=/etc/rose/store/tls.crt
- --store-key=/etc/rose/store/tls.key
{{- end }}
{{- end }}

{{- define "rose.storeMounts" -}}
{{- if .Values.store.tlsSecret }}
- { name: store-tls, mountPath: /etc/rose/store, readOnly: true }
{{- end }}
{{- if .Values.store.passwordSecret }}
- { name: store-password, mountPath: /etc/rose/store-password, readOnly: true }
{{- end }}
{{- end }}

{{- define "rose.storeVolumes" -}}
{{- if .Values.store.tlsSecret }}
- { name: store-tls, secret: { secretName: {{ .Values.store.tlsSecret }}, defaultMode: 0440 } }
{{- end }}
{{- if .Values.store.passwordSecret }}
- { name: store-password, secret: { secretName: {{ .Values.store.passwordSecret }}, defaultMode: 0440 } }
{{- end }}
{{- end }}

{{- /* A part of a process with records: (list $ KIND PART); parts: kind, spec, folder, volume. */ -}}
{{- define "rose.records" -}}
{{- $ := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $part := index . 2 -}}
{{- $kept := $.Values.records.persistence -}}
{{- if eq $part "kind" -}}
{{ ternary "StatefulSet" "Deployment" $kept.enabled }}
{{- else if eq $part "folder" -}}
/var/log/rose{{ if and $kept.enabled $kept.existingClaim }}/$(POD_NAME){{ end }}
{{- else if eq $part "volume" -}}
{{- if not $kept.enabled -}}
- { name: logs, emptyDir: { sizeLimit: 2Gi } }
{{- else if $kept.existingClaim -}}
- { name: logs, persistentVolumeClaim: { claimName: {{ $kept.existingClaim }} } }
{{- end }}
{{- else if eq $part "spec" -}}
serviceName: {{ include "rose.name" $ }}-{{ $kind }}
podManagementPolicy: Parallel
{{- if not $kept.existingClaim }}
volumeClaimTemplates:
  - metadata:
      name: logs
      labels: {{- include "rose.selector" (list $ $kind) | nindent 8 }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $kept.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: { requests: { storage: {{ $kept.size }} } }
{{- end }}
{{- end }}
{{- end }}

{{- /* A node's folder of records, on the machine; empty where they go with the pod. */ -}}
{{- define "rose.nodeRecords" -}}
{{- with .Values.records.persistence -}}
{{- if .enabled }}{{ .nodeFolder | default (printf "%s/records" $.Values.node.sharedFolder.path) }}{{ end -}}
{{- end -}}
{{- end }}

{{- /* How a node reaches its GPUs; nothing unless it is to lend. */ -}}
{{- define "rose.access" -}}
{{- if include "rose.active" . -}}
{{- if ne .Values.access "auto" -}}
{{ .Values.access }}
{{- else if .Capabilities.APIVersions.Has "resource.k8s.io/v1" -}}
dra-admin
{{- else -}}
runtime-class
{{- end -}}
{{- end -}}
{{- end }}

{{- define "rose.priorityClass" -}}
{{- .Values.node.priorityClass.name | default (printf "%s-guest" (include "rose.name" .)) -}}
{{- end }}

{{- /* The policy for all nodes, as `rose policy apply` reads it. */ -}}
{{- define "rose.policy" -}}
{{- merge (dict "name" (include "rose.name" .) "mode" .Values.mode) .Values.policy | toJson -}}
{{- end }}

{{- /* What no container of ROSE needs. */ -}}
{{- define "rose.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "rose.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- /* The root is read only: what is compiled while it runs goes to /tmp. */ -}}
{{- define "rose.asksApiServer" -}}
{{- if and (include "rose.hasControl" .) .Values.controller.enabled (not .Values.controller.kubeconfigSecret) }}yes{{ end }}
{{- end }}

{{- define "rose.env" -}}
- { name: HOME, value: /tmp }
- { name: NUMBA_CACHE_DIR, value: /tmp/numba }
{{- end }}

{{- /* On other machines and zones where there are some: (list $ "scheduler") */ -}}
{{- define "rose.spread" -}}
{{- $list := . -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "rose.selector" $list | nindent 6 }}
{{- end }}
{{- end }}

{{- /*
Options that every workload takes, a part at a time: (list $ KIND PART), and of "metadata" also the
annotations and labels that the chart has. Parts: metadata, pod, env, args, volumes, mounts, serviceAccount.
*/ -}}
{{- define "rose.common" -}}
{{- $ := index . 0 -}}
{{- $kind := index . 1 -}}
{{- $part := index . 2 -}}
{{- $v := $.Values -}}
{{- $options := get (dict "scheduler" $v.scheduler "gateway" $v.gateway "relay" $v.relay "node" $v.node "etcd" $v.store.own "operator" $v.commands "backup" $v.commands "signer" $v.tls.signer "webhook" $v.webhook) $kind -}}
{{- if eq $part "metadata" -}}
labels: {{- merge (include "rose.labels" (list $ $kind) | fromYaml) (len . | eq 5 | ternary (last .) dict) $options.podLabels | toYaml | nindent 2 }}
{{- with merge (len . | lt 3 | ternary (slice . 3 | first | default dict) dict) $options.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- else if eq $part "pod" -}}
{{- include "rose.pullSecrets" $ }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with get $options $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- $spread := $options.topologySpreadConstraints }}
{{- if and (kindIs "invalid" $spread) (has $kind (list "scheduler" "gateway" "etcd" "webhook")) }}
topologySpreadConstraints: {{- include "rose.spread" (list $ $kind) | nindent 2 }}
{{- else if $spread }}
topologySpreadConstraints: {{- toYaml $spread | nindent 2 }}
{{- end }}
{{- else if eq $part "env" -}}
{{- if ne $kind "etcd" }}{{ include "rose.env" $ }}{{ end }}
{{- if has $kind (list "scheduler" "gateway" "relay" "node") }}
- { name: ROSE_LOG_LEVEL, value: {{ $v.logLevel }} }
- { name: ROSE_LOG_FORMAT, value: {{ $v.logFormat }} }
{{- end }}
{{- with $options.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- else if eq $part "args" -}}
{{- with $options.extraArgs }}{{ toYaml . }}{{ end }}
{{- else if eq $part "volumes" -}}
{{- with $options.extraVolumes }}{{ toYaml . }}{{ end }}
{{- else if eq $part "mounts" -}}
{{- with $options.extraVolumeMounts }}{{ toYaml . }}{{ end }}
{{- else if eq $part "serviceAccount" -}}
{{- with $options.serviceAccount.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The whole file of a node; Kubernetes puts the machine's name in. */ -}}
{{- define "rose.nodeConfig" -}}
{{- $node := .Values.node -}}
{{- $config := deepCopy $node.config -}}
{{- $group := toString (int64 $node.sharedFolder.group) -}}
{{- if $config.host -}}
{{- /* Who names a host wants no other. */ -}}
{{- $_ := unset $config "discover" -}}
{{- $_ := set $config.host "page_group" ($config.host.page_group | default $group) -}}
{{- else if $config.discover -}}
{{- if eq $config.discover.folder "/run/rose" }}{{ $_ := set $config.discover "folder" $node.sharedFolder.path }}{{ end -}}
{{- $_ := set $config.discover "page_group" ($config.discover.page_group | default $group) -}}
{{- end -}}
{{- if not (include "rose.active" .) -}}
{{- /* Without replicas nobody takes weights, and nothing on the machine is asked for. */ -}}
{{- $_ := set $config "replicas" list -}}
{{- if $config.host }}{{ $_ := unset (unset $config.host "device") "devices" }}{{ end -}}
{{- if not $config.verify_key }}{{ $_ := set $config "unsigned" true }}{{ end -}}
{{- end -}}
{{- $_ := set $config "node" "@NODE_NAME@" -}}
{{- $_ := set $config "scheduler" (include "rose.schedulers" .) -}}
{{- /* In memory, and there for the next pod: beside the pages. */ -}}
{{- $_ := set $config "run_dir" (printf "%s/node" $node.sharedFolder.path) -}}
{{- $_ := set $config "weights_dir" "/var/lib/rose/node/weights" -}}
{{- $_ := set $config "log_dir" (include "rose.nodeRecords" . | default "/var/log/rose") -}}
{{- if and .Values.records.persistence.enabled (not .Values.records.persistence.nodeFolder) (not $config.logs) -}}
{{- /* The shared folder is often memory, which is the host's. */ -}}
{{- $_ := set $config "logs" (dict "file_bytes" 4194304 "files" 4) -}}
{{- end -}}
{{- $_ := set $config "metrics_port" (int $node.metricsPort) -}}
{{- if .Values.monitoring.podMonitor -}}
{{- $_ := set $config "metrics_host" "0.0.0.0" -}}
{{- if .Values.tls.insecure }}{{ $_ := set $config "metrics_insecure" true }}{{ end -}}
{{- end -}}
{{- if not .Values.tls.insecure -}}
{{- $_ := set $config "certificates" (dict "ca" "/etc/rose/tls/ca.crt" "certificate" "/etc/rose/tls/tls.crt" "key" "/etc/rose/tls/tls.key") -}}
{{- end -}}
{{- if include "rose.active" . -}}
{{- /* Engines listen on loopback; gateways are other pods. */ -}}
{{- $_ := set $config "proxy" (dict "host" "@POD_IP@" "port" (int $node.proxyPort) "insecure" .Values.tls.insecure) -}}
{{- end -}}
{{- $config | toJson | replace "$(" "$$(" | replace "@NODE_NAME@" "$(NODE_NAME)" | replace "@POD_IP@" "$(POD_IP)" -}}
{{- end }}

{{- /* Of a node's /metrics: beyond loopback it shows its certificate. */ -}}
{{- define "rose.nodeMetricsScheme" -}}
{{- if and .Values.monitoring.podMonitor (not .Values.tls.insecure) }}https{{ else }}http{{ end -}}
{{- end }}

{{- /* Node pods ask for their certificates, where nobody lists nodes or has a secret for them. */ -}}
{{- define "rose.nodesAsk" -}}
{{- $tls := .Values.tls -}}
{{- if and (include "rose.hasNodes" .) (not $tls.insecure) (not $tls.secrets.nodes) (not $tls.certManager.nodes) (or $tls.secrets.nodeCa $tls.certManager.enabled) }}true{{ end -}}
{{- end }}

{{- /* The signer's name in requests for certificates: of this release alone. */ -}}
{{- define "rose.signer" -}}
rose.dev/{{ .Release.Namespace }}.{{ include "rose.name" . }}
{{- end }}

{{- /* A secret with the CA of nodes, for who scrapes them. */ -}}
{{- define "rose.nodeCa" -}}
{{- if .Values.tls.secrets.nodes -}}
{{ .Values.tls.secrets.nodes }}
{{- else if .Values.tls.certManager.nodes -}}
{{ include "rose.name" . }}-node-{{ first .Values.tls.certManager.nodes }}-tls
{{- else if .Values.tls.secrets.nodeCa -}}
{{ .Values.tls.secrets.nodeCa }}
{{- else if .Values.tls.certManager.enabled -}}
{{ include "rose.name" . }}-node-ca-tls
{{- else -}}
{{ include "rose.name" . }}-ca
{{- end -}}
{{- end }}

{{- /* An item of `from` or `to`: pods of this release: (list $ "node") */ -}}
{{- define "rose.ours" -}}
- podSelector:
    matchLabels: {{- include "rose.selector" . | nindent 6 }}
{{- end }}

{{- define "rose.dnsEgress" -}}
- to: {{- toYaml .Values.networkPolicy.peers.dns | nindent 4 }}
  ports: [ { protocol: UDP, port: 53 }, { protocol: TCP, port: 53 } ]
{{- end }}

{{- /* A Service may follow the leader where it is one pod, or marks itself by a token of the API server. */ -}}
{{- define "rose.hasLeaderService" -}}
{{- if and (include "rose.hasControl" .) (or (eq (int .Values.scheduler.replicas) 1) (include "rose.asksApiServer" .)) }}true{{ end -}}
{{- end }}

{{- define "rose.storeEgress" -}}
{{- if .Values.store.own.enabled }}
- to: {{- include "rose.ours" (list $ "etcd") | nindent 4 }}
  ports: [ { protocol: TCP, port: 2379 } ]
{{- else if .Values.store.endpoints }}
- ports:
    {{- range .Values.store.endpoints }}
    - { protocol: TCP, port: {{ splitList ":" . | last }} }
    {{- end }}
  {{- with .Values.networkPolicy.peers.etcd }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
