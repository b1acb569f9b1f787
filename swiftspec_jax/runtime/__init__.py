"""What programs run on: devices, processes, files; and when they ran."""
