"""What people do with an embedding space: classify, calibrate, cluster, audit."""
