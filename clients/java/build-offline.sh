#!/bin/sh
# Builds and tests the client from Debian's packages alone: no network, nothing installed.
#   build-offline.sh [MAVEN_ARGUMENTS]      default: package (compile, test, jar)
#   build-offline.sh javadoc                the API pages, any warning is an error
#   build-offline.sh classpath              prints the class path of the built classes
# exit 2: packages are missing (named on stderr); else Maven's or javadoc's own exit code
set -eu
cd "$(dirname "$0")"

repository=/usr/share/maven-repo
missing=""
need() { # FILE PACKAGE
  [ -e "$1" ] || case " $missing " in *" $2 "*) ;; *) missing="$missing $2" ;; esac
}
need "$(command -v javac || echo /usr/bin/javac)" default-jdk-headless
need "$(command -v mvn || echo /usr/bin/mvn)" maven
need "$repository/com/fasterxml/jackson/core/jackson-databind" libjackson2-databind-java
need "$repository/org/junit/jupiter/junit-jupiter" junit5
need "$repository/org/apache/maven/plugins/maven-surefire-plugin" maven-debian-helper
need "$repository/org/apache/maven/surefire/surefire-junit-platform" libsurefire-java
if [ -n "$missing" ]; then
  echo "the offline build needs Debian packages that are not installed:$missing" >&2
  echo "hint: apt-get install -y$missing" >&2
  exit 2
fi

jars=/usr/share/java/jackson-databind.jar:/usr/share/java/jackson-core.jar:/usr/share/java/jackson-annotations.jar
case "${1:-package}" in
  javadoc)
    mkdir -p target
    exec javadoc --release 11 -Xdoclint:all -Werror -quiet -d target/javadoc -classpath "$jars" \
      -sourcepath src/main/java io.llamarack.client ;;
  classpath)
    echo "$PWD/target/classes:$PWD/target/test-classes:$jars" ;;
  *)
    # The local repository stays in target/: the system's own folder is only read.
    exec mvn -B -o -ntp -s debian-settings.xml -Daether.offline.protocols=file \
      -Dmaven.repo.local=target/repository "${@:-package}" ;;
esac
