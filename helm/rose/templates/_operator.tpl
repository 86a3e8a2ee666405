{{- /* What the job that applies the policy and the pod of `helm test` have in common. */ -}}
{{- define "rose.operatorPod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
restartPolicy: Never
{{- include "rose.common" (list $ "operator" "pod") }}
securityContext: {{- include "rose.podSecurity" . | nindent 2 }}
{{- end }}

{{- define "rose.operatorContainer" -}}
image: {{ include "rose.image" (list $ "control") }}
imagePullPolicy: {{ .Values.images.control.pullPolicy }}
env: {{- include "rose.common" (list $ "operator" "env") | nindent 2 }}
securityContext: {{- include "rose.containerSecurity" . | nindent 2 }}
resources: { requests: { cpu: 50m, memory: 128Mi }, limits: { memory: 512Mi } }
{{- end }}

{{- define "rose.operatorMounts" -}}
- { name: tmp, mountPath: /tmp }
{{- with include "rose.common" (list $ "operator" "mounts") }}
{{ . }}
{{- end }}
{{- if not .Values.tls.insecure }}
- { name: tls, mountPath: /etc/rose/tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "rose.operatorVolumes" -}}
- { name: tmp, emptyDir: { sizeLimit: 64Mi } }
{{- with include "rose.common" (list $ "operator" "volumes") }}
{{ . }}
{{- end }}
{{- if not .Values.tls.insecure }}
{{ include "rose.tlsVolumes" (list $ "operator") }}
{{- end }}
{{- end }}
