{{- define "petiole.name" -}}
{{- printf "%s-%s" .root.Release.Name .part | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "petiole.selector" -}}
app.kubernetes.io/name: petiole
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "petiole.labels" -}}
{{ include "petiole.selector" . }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* Of a pod: no root, no rights, nothing writable but its volumes. */ -}}
{{- define "petiole.pod" -}}
automountServiceAccountToken: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 10001 }}
  runAsGroup: {{ .user | default 10001 }}
  fsGroup: {{ .user | default 10001 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "petiole.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "petiole.image" -}}
image: {{ printf "%s:%s" .root.Values.image.repository .tag | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end -}}

{{- /* A part's own secret or key, or that of all parts. */ -}}
{{- define "petiole.broker" -}}
{{- $broker := merge dict (default dict .own) .root.Values.broker -}}
- name: PETIOLE_BROKER_URL
  valueFrom:
    secretKeyRef:
      name: {{ $broker.secret }}
      key: {{ $broker.key }}
{{- end -}}

{{- define "petiole.settings" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end -}}
