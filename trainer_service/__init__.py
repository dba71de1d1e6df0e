"""The trainer cluster: learns from leased batches and publishes new policies."""
