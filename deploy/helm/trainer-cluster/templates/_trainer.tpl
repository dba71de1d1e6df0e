{{/* The trainer's pod, in a StatefulSet or a LeaderWorkerSet. */}}
{{- define "trainer-cluster.trainer-pod" -}}
{{- $at := dict "root" $ "component" "trainer" -}}
{{- $name := include "leeway.name" . -}}
{{- $many := gt (mul .Values.trainer.pods .Values.trainer.processes) 1 -}}
{{- if and (gt (int .Values.trainer.pods) 1) (eq .Values.trainer.storage.accessMode "ReadWriteOnce") -}}
{{- fail "trainer.pods > 1: all pods write into one directory of checkpoints; set trainer.storage.accessMode to ReadWriteMany" -}}
{{- end -}}
metadata:
  labels:
    {{- include "leeway.labels" $at | nindent 4 }}
    {{- if eq (int .Values.trainer.pods) 1 }}
    leeway.dev/endpoint: "true"
    {{- end }}
  annotations:
    {{- include "leeway.checksums" . | nindent 4 }}
spec:
  {{- include "leeway.pod" $at | nindent 2 }}
  {{- include "leeway.scheduling" (merge (dict "values" .Values.trainer) $at) | nindent 2 }}
  # A checkpoint is written on the way out.
  terminationGracePeriodSeconds: 300
  containers:
    - name: trainer
      image: {{ include "leeway.image" (dict "root" $ "image" .Values.images.trainer) }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      {{- if $many }}
      command: [torchrun]
      args:
        - --nnodes={{ .Values.trainer.pods }}
        - --nproc-per-node={{ .Values.trainer.processes }}
        # The first pod leads: it alone talks to the queue, and serves the weights.
        - --node-rank=$(POD_INDEX)
        {{- if .Values.trainer.leaderWorkerSet }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- else }}
        - --master-addr={{ $name }}-trainer-0.{{ $name }}-trainer
        {{- end }}
        - --master-port=29400
        - --max-restarts=3
        - --module
        - leeway.cli
        - trainer
        - /leeway/config/run.yaml
        - --stay
      {{- else }}
      command: [leeway]
      args: [trainer, /leeway/config/run.yaml, --stay]
      {{- end }}
      env:
        {{- if $many }}
        - name: POD_INDEX
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['{{ include "trainer-cluster.index-label" . }}']
        {{- end }}
        {{- include "leeway.environment" $at | nindent 8 }}
        {{- include "trainer-cluster.security" (merge (dict "role" "trainer") $at) | nindent 8 }}
        - name: LEEWAY__QUEUE__ADDRESS
          value: {{ $name }}-endpoint:7000
        - name: LEEWAY__WEIGHTS__ADDRESS
          value: 0.0.0.0:7001
      ports:
        - {name: weights, containerPort: 7001, protocol: TCP}
        - {name: metrics, containerPort: 9100, protocol: TCP}
        {{- if $many }}
        - {name: rendezvous, containerPort: 29400, protocol: TCP}
        {{- end }}
      {{- include "leeway.probes" .Values.trainer | nindent 6 }}
      resources:
        {{- include "leeway.gpu-resources" .Values.trainer | nindent 8 }}
      securityContext:
        {{- include "leeway.container-security" . | nindent 8 }}
      volumeMounts:
        {{- include "leeway.mounts" . | nindent 8 }}
        {{- include "leeway.model-mounts" . | nindent 8 }}
        {{- include "trainer-cluster.security-mounts" . | nindent 8 }}
        - {name: runs, mountPath: /leeway/runs}
        - {name: shared-memory, mountPath: /dev/shm}
  volumes:
    {{- include "leeway.volumes" . | nindent 4 }}
    {{- include "leeway.model-volumes" . | nindent 4 }}
    {{- include "trainer-cluster.security-volumes" (dict "root" $ "of" "trainer") | nindent 4 }}
    - name: runs
      persistentVolumeClaim:
        claimName: {{ $name }}-runs
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.trainer.sharedMemory }}
{{- end }}
