"""Playbooks that come with schedtop: YAML files, run by name with `schedtop play NAME`."""
