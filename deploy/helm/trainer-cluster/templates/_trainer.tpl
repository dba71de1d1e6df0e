{{/* The trainer's pod, in a StatefulSet or a LeaderWorkerSet. */}}
{{- define "trainer-cluster.trainer-pod" -}}
{{- $at := dict "root" $ "component" "trainer" -}}
{{- $name := include "leeway.name" . -}}
{{- $many := or (gt (mul .Values.trainer.pods .Values.trainer.processes) 1) (gt (int .Values.trainer.minPods) 0) -}}
{{- if and (gt (int .Values.trainer.pods) 1) (eq .Values.trainer.storage.accessMode "ReadWriteOnce") -}}
{{- fail "trainer.pods > 1: all pods write into one directory of checkpoints; set trainer.storage.accessMode to ReadWriteMany" -}}
{{- end -}}
{{- $elastic := gt (int .Values.trainer.minPods) 0 -}}
{{- if gt (int .Values.trainer.minPods) (int .Values.trainer.pods) -}}
{{- fail "trainer.minPods > trainer.pods: training would never begin; set it to at most trainer.pods" -}}
{{- end -}}
{{- if and $elastic .Values.trainer.leaderWorkerSet -}}
{{- fail "trainer.minPods with trainer.leaderWorkerSet: a LeaderWorkerSet makes all its pods anew when one is lost; set trainer.leaderWorkerSet to false" -}}
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
        - --nproc-per-node={{ .Values.trainer.processes }}
        # The first pod leads: it alone talks to the queue, and serves the weights.
        {{- if $elastic }}
        - --nnodes={{ .Values.trainer.minPods }}:{{ .Values.trainer.pods }}
        - --rdzv-backend=c10d
        - --rdzv-endpoint={{ $name }}-trainer-0.{{ $name }}-trainer:29400
        - --rdzv-id={{ $name }}
        # A pod that is silent for 15 s is lost; those that are left wait for others for 10 s.
        - --rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=3,last_call_timeout=10
        # Pods are ranked by their addresses.
        - --local-addr=$(POD_NAME).{{ $name }}-trainer
        # Each lost pod is one.
        - --max-restarts=1000
        {{- else }}
        - --nnodes={{ .Values.trainer.pods }}
        - --node-rank=$(POD_INDEX)
        {{- if .Values.trainer.leaderWorkerSet }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- else }}
        - --master-addr={{ $name }}-trainer-0.{{ $name }}-trainer
        {{- end }}
        - --master-port=29400
        - --max-restarts=3
        {{- end }}
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
        {{- if $elastic }}
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        # Otherwise torchrun's agents that stay do not say again where ranks meet.
        - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
          value: "1"
        {{- else if $many }}
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
      {{- /* While pods meet anew, nobody answers. */}}
      {{- include "leeway.probes" (merge (dict "silentChecks" (ternary 12 3 $elastic)) .Values.trainer) | nindent 6 }}
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
