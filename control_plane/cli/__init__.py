from control_plane.cli.app import main as main
