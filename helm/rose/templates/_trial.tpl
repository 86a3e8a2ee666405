{{- /* Values that a trial sets, whatever else they are; each template asks for it before it reads any. */ -}}
{{- define "rose.trial" -}}
{{- if .Values.trial }}
{{- $_ := set .Values.scheduler "replicas" 1 }}
{{- $_ := set .Values.gateway "replicas" 1 }}
{{- $_ := set .Values.store.own "enabled" false }}
{{- $_ := set .Values.node.sharedFolder "prepare" true }}
{{- $_ := set .Values.toolbox "enabled" true }}
{{- end }}
{{- end }}

{{- /* Self-made certificates: where none are named and nothing is lent. */ -}}
{{- define "rose.selfMade" -}}
{{- if not (or .Values.tls.insecure .Values.tls.certManager.enabled (include "rose.active" .) (ne .Values.role "all") (values .Values.tls.secrets | join "")) }}true{{ end -}}
{{- end }}

{{- /* Volumes of a pod's certificate, its secret or that of its issuer: (list $ "scheduler") */ -}}
{{- define "rose.tlsVolumes" -}}
{{- with include "rose.secret" . -}}
- { name: tls, secret: { secretName: {{ . }}, defaultMode: 0440 } }
{{- else -}}
- { name: tls, emptyDir: { medium: Memory, sizeLimit: 1Mi } }
- { name: issuing, emptyDir: { medium: Memory, sizeLimit: 1Mi } }
- name: ca
  secret:
    secretName: {{ include "rose.name" (index . 0) }}-ca
    defaultMode: 0440
    items: [ { key: tls.crt, path: ca.pem }, { key: tls.key, path: ca.key } ]
{{- end }}
{{- end }}

{{- /*
A container that issues the pod's certificate, and again before it ends; it alone sees the CA's key.
Nothing where a secret has the certificate. (list $ "scheduler" NAME HOSTS), or before a container that
ends: (list $ "operator" NAME HOSTS "once")
*/ -}}
{{- define "rose.issuer" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- if include "rose.selfMade" $ -}}
- name: identity
  {{- if eq (len .) 4 }}
  restartPolicy: Always
  startupProbe:
    exec: { command: [/usr/bin/test, -s, /etc/rose/tls/tls.key] }
    periodSeconds: 1
    failureThreshold: 60
  {{- end }}
  image: {{ include "rose.image" (list $ "control") }}
  imagePullPolicy: {{ $.Values.images.control.pullPolicy }}
  command:
    - /bin/sh
    - -ec
    - |
      umask 077
      trap 'exit 0' TERM INT
      hand() {
        cp "/issuing/$1" "/etc/rose/tls/.$2" && mv "/etc/rose/tls/.$2" "/etc/rose/tls/$2"
      }
      role=$1 name=$2
      shift 2
      while :; do
        cp /ca/ca.pem /ca/ca.key /issuing/
        rose certs issue "$role" "$name" --dir=/issuing --cluster={{ $.Values.cluster }} "$@"
        hand ca.pem ca.crt
        hand "$role-$name.pem" tls.crt
        hand "$role-$name.key" tls.key
        {{- if eq (len .) 4 }}
        sleep 43200 &
        wait $!
        {{- else }}
        exit 0
        {{- end }}
      done
    - identity
  args:
    - {{ $role }}
    - {{ index . 2 }}
    {{- range index . 3 }}
    - --host={{ . }}
    {{- end }}
  env:
    {{- if eq $role "node" }}
    - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
    {{- end }}
    {{- include "rose.env" $ | nindent 4 }}
  securityContext: {{- include "rose.containerSecurity" $ | nindent 4 }}
  resources: { requests: { cpu: 10m, memory: 16Mi }, limits: { memory: 128Mi } }
  volumeMounts:
    - { name: ca, mountPath: /ca, readOnly: true }
    - { name: issuing, mountPath: /issuing }
    - { name: tls, mountPath: /etc/rose/tls }
{{- end }}
{{- end }}
