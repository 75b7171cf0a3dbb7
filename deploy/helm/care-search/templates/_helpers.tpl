{{/* Names and blocks that several templates share. */}}
{{- define "care.name" -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- end }}

{{- define "care.claim" -}}{{ .Values.collection.claim | default (printf "%s-collection" (include "care.name" .)) }}{{- end }}

{{- define "care.selector" -}}
app.kubernetes.io/name: care-search
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "care.labels" -}}
{{ include "care.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "care.image" -}}{{ .Values.image.repository }}:{{ .Values.image.tag }}{{- end }}

{{/* Not root, and nothing that a search does not need. 10001 is the image's user. */}}
{{- define "care.pod" -}}
automountServiceAccountToken: false
# Kubernetes would set CARE_…_PORT for a Service of such a name, which the service refuses as an unknown setting.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "care.container" -}}
image: {{ include "care.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
